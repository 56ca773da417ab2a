"""Bugs in copies of a CUDA device: fences, streams, buffers, borders and turns."""

from __future__ import annotations

from mutant import Mutant

PATH = "kvbm/device/cuda.py"
RUNTIME = "kvbm/device/cuda_runtime.py"
PATH_TESTS = "tests/device/test_cuda_path.py"
RUNTIME_TESTS = "tests/device/test_cuda_runtime.py"
WORKER_TESTS = "tests/device/test_worker_on_late_device.py"

MUTANTS = (
    Mutant(
        name="cuda-forgets-the-fence",
        bug="blocks are read before the forward pass that computes them, and written under one that reads them",
        file=PATH,
        old="                runtime.wait(handle, fence)\n",
        new="                pass\n",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-records-no-fence",
        bug="the fence marks nothing",
        file=PATH,
        old="        return self._runtime.record_engine()\n",
        new="        return None\n",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-waits-behind-the-copies",
        bug="the stream waits for the fence after its copies",
        file=PATH,
        old="""\
            if fence is not None:
                runtime.wait(handle, fence)
            kept = self._enqueue(stream, moves, to_host=to_host)
""",
        new="""\
            kept = self._enqueue(stream, moves, to_host=to_host)
            if fence is not None:
                runtime.wait(handle, fence)
""",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-worker-offloads-without-a-fence",
        bug="the worker does not pass the fence on to offloads",
        file="kvbm/device/worker.py",
        old="[partial(self._run_offload, order, part, uncopied, fence)",
        new="[partial(self._run_offload, order, part, uncopied, None)",
        fails=WORKER_TESTS,
    ),
    Mutant(
        name="cuda-worker-onboards-without-a-fence",
        bug="the worker does not pass the fence on to onboards",
        file="kvbm/device/worker.py",
        old="[partial(self._run_onboard, order, part, uncopied, fence)",
        new="[partial(self._run_onboard, order, part, uncopied, None)",
        fails=WORKER_TESTS,
    ),
    Mutant(
        name="cuda-reports-before-the-event",
        bug="a copy is reported when it is enqueued",
        file=PATH,
        old="runtime.synchronize(runtime.record(handle))",
        new="runtime.record(handle)",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-records-before-the-copies",
        bug="the event that ends a copy is recorded before its copies are enqueued",
        file=PATH,
        old="""\
            kept = self._enqueue(stream, moves, to_host=to_host)
            runtime.synchronize(runtime.record(handle))
""",
        new="""\
            done = runtime.record(handle)
            kept = self._enqueue(stream, moves, to_host=to_host)
            runtime.synchronize(done)
""",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-skips-the-drain",
        bug="after a failure the stream is not waited for: what was enqueued lands after the report",
        file=PATH,
        old="            self._drain(stream)\n",
        new="",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-drains-after-cuda-errors-only",
        bug="after an exception that is not of CUDA, the copy is reported while enqueued parts of it still run",
        file=PATH,
        old="        except BaseException as error:  # whatever",
        new="        except RuntimeError as error:  # whatever",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-keeps-a-stream-after-an-error",
        bug="a failed copy does not return its stream; after a few of them no copy starts",
        file=PATH,
        old="            finally:\n                streams.put(stream)\n",
        new="            except ZeroDivisionError:\n                raise\n            streams.put(stream)\n",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-returns-a-stream-before-the-event",
        bug="the next thread overwrites the buffers of a stream whose copies have not run",
        file=PATH,
        old="                self._run_batch(stream, moves[",
        new="                streams.put(stream)\n                self._run_batch(stream, moves[",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-streams-share-a-staging-buffer",
        bug="both streams of a direction gather into one buffer",
        file=PATH,
        old="""\
            streams.put(_CopyStream.make(self._runtime, least, staged, self._slot_stride, element))
""",
        new="""\
            stream = _CopyStream.make(self._runtime, least, staged, self._slot_stride, element)
            kept = streams.get() if not streams.empty() else stream
            streams.put(kept)
            if kept is not stream:
                stream = _CopyStream(stream.handle, kept.staging, kept.staged_bytes, stream.host_rows, stream.rows)
                streams.put(stream)
""",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-streams-share-their-rows",
        bug="both streams of a direction read their block numbers from one buffer",
        file=PATH,
        old="""\
            streams.put(_CopyStream.make(self._runtime, least, staged, self._slot_stride, element))
""",
        new="""\
            stream = _CopyStream.make(self._runtime, least, staged, self._slot_stride, element)
            kept = streams.get() if not streams.empty() else stream
            streams.put(kept)
            if kept is not stream:
                stream = _CopyStream(stream.handle, stream.staging, stream.staged_bytes, kept.host_rows, kept.rows)
                streams.put(stream)
""",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-scatters-before-the-copy",
        bug="an onboard scatters what an earlier copy left in the staging buffer",
        file=PATH,
        old="""\
        kept = self._copy(stream, [self._staged(stream, moves)], to_host=to_host)
        for sheet in () if to_host else self._sheets:
            self._runtime.scatter(stream.handle, sheet.inside(staging), rows, sheet.g1)
""",
        new="""\
        for sheet in () if to_host else self._sheets:
            self._runtime.scatter(stream.handle, sheet.inside(staging), rows, sheet.g1)
        kept = self._copy(stream, [self._staged(stream, moves)], to_host=to_host)
""",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-thread-without-a-device",
        bug="a copying thread of a rank above 0 opens a context on GPU 0",
        file=PATH,
        old="        self._runtime.use_device()\n",
        new="",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-thread-without-a-context",
        bug="the driver has no context in a thread that uses the default device: its calls fail",
        file=RUNTIME,
        old="        self._driver.use_context()\n",
        new="",
        fails=RUNTIME_TESTS,
    ),
    Mutant(
        name="cuda-pins-on-gpu-0",
        bug="host memory is page-locked on the device that the thread happens to use",
        file="kvbm/device/worker.py",
        old="        with on_device(storages[0]):  # page-locks",
        new="        if True:  # page-locks",
        fails=RUNTIME_TESTS,
    ),
    Mutant(
        name="cuda-unpins-on-gpu-0",
        bug="the thread that closes a segment opens a context on GPU 0",
        file="kvbm/host/shared_memory.py",
        old="            with torch.cuda.device(self._pin_device):\n",
        new="            if True:\n",
        fails="tests/host/test_region.py -k page_locked",
    ),
    Mutant(
        name="cuda-staged-copies-cross-a-border-of-pins",
        bug="a copy of consecutive slots crosses from one page-locked range into the next",
        file=PATH,
        old="np.array(consecutive(moves.slots, border=self._slots_per_pin)).T",
        new="np.array(consecutive(moves.slots)).T",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-direct-copies-cross-a-border-of-pins",
        bug="a copy of neighbours in G1 and in host memory crosses from one page-locked range into the next",
        file=PATH,
        old="np.array(consecutive(moves.slots, moves.blocks, border=self._slots_per_pin)).T",
        new="np.array(consecutive(moves.slots, moves.blocks)).T",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-joins-by-slot-alone",
        bug="blocks with neighbouring slots are copied together although they are no neighbours in G1",
        file=PATH,
        old="np.array(consecutive(moves.slots, moves.blocks, border=self._slots_per_pin)).T",
        new="np.array(consecutive(moves.slots, border=self._slots_per_pin)).T",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-streams-outrank-the-engine",
        bug="copies have the greatest priority, which is the smallest number",
        file=PATH,
        old="        least, _ = self._runtime.priority_range()\n",
        new="        _, least = self._runtime.priority_range()\n",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-batch-has-the-length-of-one-slot",
        bug="a run of slots is copied with the length of its first slot",
        file=PATH,
        old="return Spans(stream.staged_bytes, begin * stride, moves.slots[begin] * stride, (end - begin) * stride)",
        new="return Spans(stream.staged_bytes, begin * stride, moves.slots[begin] * stride, end * 0 + stride)",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-batch-has-one-length-for-all-pieces",
        bug="all pieces of a block are copied with the length of the first one",
        file=PATH,
        old="lengths = np.broadcast_to(self.lengths, starts.shape)",
        new="lengths = np.broadcast_to(self.lengths[:1], starts.shape)",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-batch-frees-its-numbers",
        bug="the arrays of addresses are freed while the driver may still read them",
        file=PATH,
        old="            kept = self._enqueue(stream, moves, to_host=to_host)\n",
        new="            kept = self._enqueue(stream, moves, to_host=to_host) and None\n",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-fallback-copies-nothing",
        bug="the copies that the driver refused are reported without being made",
        file=PATH,
        old='one by one from now on", error)\n',
        new='one by one from now on", error)\n                return None\n',
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-fallback-is-forgotten",
        bug="every copy asks the driver again and writes a line to the log",
        file=PATH,
        old="                self._uses_batch_copy = False\n",
        new="",
        fails=PATH_TESTS,
    ),
    Mutant(
        name="cuda-driver-may-read-early",
        bug="the driver may read G1 before the fence",
        file=RUNTIME,
        old="SOURCE_ACCESS_IN_STREAM_ORDER = 1",
        new="SOURCE_ACCESS_IN_STREAM_ORDER = 3",
        fails=RUNTIME_TESTS,
    ),
    Mutant(
        name="cuda-driver-swaps-the-sides",
        bug="an offload copies host memory over G1",
        file=RUNTIME,
        old="""\
        targets, sources = (host, device) if to_host else (device, host)
        self._driver""",
        new="""\
        targets, sources = (device, host) if to_host else (host, device)
        self._driver""",
        fails=RUNTIME_TESTS,
    ),
    Mutant(
        name="cuda-old-driver-is-called",
        bug="the call is used although the driver does not have it",
        file=RUNTIME,
        old="return self._driver.batch_copy is not None",
        new="return True",
        fails=RUNTIME_TESTS,
    ),
    Mutant(
        name="cuda-pool-has-no-turns",
        bug="all parts of a long onboard are copied before a short one begins",
        file="kvbm/device/pool.py",
        old="            self._turns[turn] = tasks\n",
        new="            self._turns = {turn: tasks, **self._turns}\n",
        fails=f"tests/device/test_pool.py {WORKER_TESTS}",
    ),
    Mutant(
        name="pool-gives-one-order-all-threads",
        bug="on the CPU, a long order takes all cores from the engine",
        file="kvbm/device/pool.py",
        old="for task in self._running.values()) < self._parts_at_once",
        new="for task in self._running.values()) < self._parts_at_once + 1",
        fails="tests/device/test_pool.py",
    ),
    Mutant(
        name="cuda-worker-has-no-slices",
        bug="a long onboard is one part, and a short one waits for all of it",
        file="kvbm/device/worker.py",
        old="        size = max(1, min(size, self.slice_bytes // block_bytes))\n",
        new="        size = max(1, size)\n",
        fails=WORKER_TESTS,
    ),
    Mutant(
        name="cuda-failed-slice-fails-all",
        bug="one slice that fails discards the blocks of all slices of an offload",
        file="kvbm/device/worker.py",
        old="self._segment.write_slots(self._unproven(order), order.generation, state)",
        new="self._segment.write_slots(order.slots, order.generation, state)",
        fails=WORKER_TESTS,
    ),
)
