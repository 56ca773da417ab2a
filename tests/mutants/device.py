"""Bugs in transfers: the copiers, their pool, and the memory they copy to."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="copier-ignores-padding",
        bug="Slots with padding are gathered as if they followed each other without gaps.",
        file="kvbm/device/copier.py",
        old='''\
        if self.block_bytes != self.payload.shape[1]:  # padding separates the slots
            runs = [(index, index + 1) for index in range(len(moves))]
        return runs if len(moves) * self.block_bytes >= MIN_GATHER_BYTES * len(runs) else None

    def spans(self, moves: Moves, runs: list[tuple[int, int]]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (row numbers in G1, rows of the slots), per run of slots."""
        for begin, end in runs:
            rows = moves.blocks[begin:end, None] * self.rows_per_stride + self.rows_of_block_0
            first = int(moves.slots[begin])
            data = self.payload[first : first + end - begin, : self.block_bytes].reshape(-1)
''',
        new='''\
        return runs if len(moves) * self.block_bytes >= MIN_GATHER_BYTES * len(runs) else None

    def spans(self, moves: Moves, runs: list[tuple[int, int]]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (row numbers in G1, rows of the slots), per run of slots."""
        for begin, end in runs:
            rows = moves.blocks[begin:end, None] * self.rows_per_stride + self.rows_of_block_0
            first = int(moves.slots[begin])
            data = self.payload.reshape(-1)[first * self.payload.shape[1] :][: (end - begin) * self.block_bytes]
''',
        fails="tests/device/test_copier.py",
    ),
    Mutant(
        name="copier-joins-by-slot-alone",
        bug="Blocks with neighbouring slots are moved together although they are no neighbours in G1.",
        file="kvbm/device/copier.py",
        old="else consecutive(moves.slots, moves.blocks)",
        new="else slot_runs",
        fails="tests/device/test_copier.py",
    ),
    Mutant(
        name="copier-keeps-the-gil",
        bug=(
            "Rows are opaque bytes, which numpy scatters with the GIL held: the engine stands still while blocks are "
            "onboarded."
        ),
        file="kvbm/device/copier.py",
        old="""\
            self._rows.g1[rows] = slots
""",
        new="""\
            opaque = f"V{self._rows.g1.shape[1] * 8}"
            self._rows.g1.view(opaque)[:, 0][rows] = slots.view(opaque)[:, 0]
""",
        fails="tests/device/test_copier.py",
    ),
    Mutant(
        name="copier-orders-only-the-slots",
        bug="Slots are sorted to make runs, and the blocks that belong to them stay where they are.",
        file="kvbm/device/copier.py",
        old="np.asarray(block_ids, np.int64)[order])",
        new="np.asarray(block_ids, np.int64))",
        fails="tests/device/test_copier.py",
    ),
    Mutant(
        name="copier-wraps-bad-numbers",
        bug="A negative block or slot is taken from the end instead of refused.",
        file="kvbm/device/copier.py",
        old="if np.maximum.reduce(moves.blocks.view(np.uint64)) >= self._block_count:",
        new="if np.maximum.reduce(moves.blocks) >= self._block_count:",
        fails="tests/device/test_copier.py",
    ),
    Mutant(
        name="pool-forgets-a-dead-thread",
        bug="A thread that died is not replaced, and after a few of them nothing is copied any more.",
        file="kvbm/device/pool.py",
        old="if self._is_closed or all(thread.is_alive() for thread in self._threads):",
        new="if not self._outstanding or self._outstanding:",
        fails="tests/device/test_pool.py",
    ),
    Mutant(
        name="pool-loses-what-waits-at-close",
        bug="Closing drops the copies that have not begun, and nobody hears of them.",
        file="kvbm/device/pool.py",
        old="""\
            self._finished += [task.finished(TransferError(f"{self._name}: closed")) for task in self._waiting.clear()]
""",
        new="",
        fails="tests/device/test_pool.py",
    ),
    Mutant(
        name="pool-notifies-one-share",
        bug="The threads of one share copy all parts of an order on the same core, one after the other.",
        file="kvbm/device/pool.py",
        old="self._next_share = share + 1",
        new="self._next_share = 0",
        fails="tests/device/test_pool.py",
    ),
    Mutant(
        name="pool-survives-only-exceptions",
        bug="A copy that ends its thread with SystemExit takes its ticket with it: the transfer never ends.",
        file="kvbm/device/pool.py",
        old="except BaseException as error:",
        new="except Exception as error:",
        fails="tests/device/test_pool.py -W ignore",
    ),
    Mutant(
        name="region-children-keep-the-memory",
        bug="Every child process that the engine starts inherits the segment: its memory outlives the engine.",
        file="kvbm/host/shared_memory.py",
        old="fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING",
        new="fd = os.memfd_create(name, os.MFD_ALLOW_SEALING",
        fails="tests/host/test_region.py",
    ),
    Mutant(
        name="region-failure-does-not-wait",
        bug="One rank's failure ends a transfer while the copier of another rank may still be writing.",
        file="kvbm/host/control_words.py",
        old="""\
    states[~is_reported.all(axis=0)] = int(SlotState.EMPTY)
""",
        new="""\
    has_failed = found == control_word(generation, SlotState.FAILED)
    states[~is_reported.all(axis=0) & ~has_failed.any(axis=0)] = int(SlotState.EMPTY)
""",
        fails="tests/host/test_region.py",
    ),
    Mutant(
        name="region-forgets-the-generation",
        bug="An onboard takes any ready slot, whichever transfer filled it: the slot may hold another block.",
        file="kvbm/host/segment.py",
        old="return bool(np.array_equal(found, ready_words(generations)))",
        new="return bool(np.array_equal(found & np.uint64(0xFF), ready_words(generations) & np.uint64(0xFF)))",
        fails="tests/host/test_region.py",
    ),
    Mutant(
        name="region-barrier-requires-registration",
        bug="On Arm, Linux refuses the memory barrier of a process that only maps a segment.",
        file="kvbm/host/shared_memory.py",
        old="MEMBARRIER_GLOBAL_EXPEDITED = 1 << 1",
        new="MEMBARRIER_GLOBAL_EXPEDITED = 1 << 3",
        fails="tests/host/test_memory_order.py",
    ),
    Mutant(
        name="region-words-are-read-without-barrier",
        bug="On Arm, a rank may read the bytes of an onboard before it reads the word that proves them.",
        file="kvbm/host/segment.py",
        old="""\
        found = self._lane_words[checked_indexes([lane], LANES)][0]
        order_memory()
""",
        new="""\
        found = self._lane_words[checked_indexes([lane], LANES)][0]
""",
        fails="tests/host/test_memory_order.py",
    ),
    Mutant(
        name="region-lanes-overlap-the-slots",
        bug="The words of slots begin one word too late, so that a lane's report overwrites the last slot's.",
        file="kvbm/host/control_words.py",
        old="            slots=words[: self.slot_count],",
        new="            slots=words[1 : self.slot_count + 1],",
        fails="tests/host/test_region.py",
    ),
    Mutant(
        name="region-one-rank-is-enough",
        bug="A slot counts as ready when one rank has proven it, although the others have not.",
        file="kvbm/host/control_words.py",
        old="""\
    states = np.where(is_ready.all(axis=0), int(SlotState.READY), int(SlotState.FAILED))
    states[~is_reported.all(axis=0)] = int(SlotState.EMPTY)
""",
        new="""\
    states = np.where(is_ready.any(axis=0), int(SlotState.READY), int(SlotState.FAILED))
    states[~is_reported.any(axis=0)] = int(SlotState.EMPTY)
""",
        fails="tests/host/test_region.py",
    ),
    Mutant(
        name="region-sees-only-the-machine",
        bug="The room that a control group leaves is ignored: in a container the kernel kills the engine at start-up.",
        file="kvbm/host/machine_memory.py",
        old="return [*rooms, *self._control_group_rooms(process)]",
        new="return rooms",
        fails="tests/host/test_machine_memory.py tests/host/test_region.py",
    ),
    Mutant(
        name="region-can-be-shortened",
        bug="any process that has a segment's descriptor can end the others by SIGBUS",
        file="kvbm/host/shared_memory.py",
        old="        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)\n",
        new="        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)\n",
        fails="tests/host/test_region.py",
    ),
    Mutant(
        name="region-trusts-a-length-that-can-change",
        bug="the leader maps a segment without looking at its seals",
        file="kvbm/host/shared_memory.py",
        old="return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS and os.fstat",
        new="return os.fstat",
        fails="tests/host/test_region.py -k shortened",
    ),
    Mutant(
        name="region-splits-a-slot-between-two-pins",
        bug="a slot lies in two page-locked ranges, and its copies never succeed",
        file="kvbm/host/shared_memory.py",
        old="least = math.lcm(unit, mmap.PAGESIZE)",
        new="unit = least = mmap.PAGESIZE",
        fails="tests/host/test_region.py -k page_locked",
    ),
    Mutant(
        name="region-insists-on-huge-pages",
        bug="a rank that loses the race for huge pages does not start",
        file="kvbm/host/shared_memory.py",
        old="            except EnvironmentProblem as problem:  # another",
        new="            except ZeroDivisionError as problem:  # another",
        fails="tests/host/test_region.py -k race",
    ),
    Mutant(
        name="region-heartbeat-is-a-lane",
        bug="the heartbeat overwrites the word of the last lane",
        file="kvbm/host/control_words.py",
        old="            heartbeats=rows[:, -1:],",
        new="            heartbeats=rows[:, LANES - 1 : LANES],",
        fails="tests/host/test_region.py",
    ),
    Mutant(
        name="thread-that-dies-is-waited-for",
        bug="an engine waits for ever for the first step of a thread whose memory has run out",
        file="kvbm/host/threads.py",
        old='    vars(thread)["_started"] = _LimitedEvent()',
        new="    _ = _LimitedEvent()",
        fails="tests/host/test_threads.py --timeout 20",
    ),
)
