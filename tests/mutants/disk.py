"""Bugs in the disk tier: its files, its index and its I/O."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="cache-of-somebody-ends-clear",
        bug="a cache of another user keeps `kvbm cache clear` from removing the user's own",
        file="kvbm_cli/cache/disk_caches.py",
        old="    return why is None\n",
        new="    return True\n",
        fails="tests/cli/test_planted_stores.py -k names_those_that_are_not",
    ),
    Mutant(
        name="cache-is-removed-by-its-path",
        bug="a cache whose path has become a link since it was locked is removed where the link leads",
        file="kvbm/tiers/disk/directory.py",
        old="            if not home.has_at(instance.name, lock.directory.descriptor):\n"
        '                raise OSError(errno.ESTALE, "another directory has its name")\n',
        new="            for name in names:\n                os.unlink(instance / name)\n",
        fails="tests/cli/test_planted_stores.py -k not_removed_elsewhere",
    ),
    Mutant(
        name="aio-does-not-wait-when-interrupted",
        bug="A batch that is interrupted leaves its I/O running into the buffers.",
        file="kvbm/tiers/disk/io/kernel_aio.py",
        old="""\
            self.close()
""",
        new="",
        fails="tests/disk/test_kernel_aio.py",
    ),
    Mutant(
        name="aio-part-is-taken-for-all",
        bug="A request of a batch that moved only some of its bytes counts as done.",
        file="kvbm/tiers/disk/io/threads.py",
        old="if count != wanted",
        new="if count < 0",
        fails="tests/disk/test_kernel_aio.py",
    ),
    Mutant(
        name="disk-auto-takes-nixl-however-slow",
        bug="`io: auto` takes NIXL wherever it works, however slow it is.",
        file="kvbm/tiers/disk/io/select.py",
        old="return Choice(queue if nixl > FASTER * threads else None, shown)",
        new="return Choice(queue, shown)",
        fails="tests/disk/test_select.py",
    ),
    Mutant(
        name="disk-believes-every-byte",
        bug="A block that was read is good, whatever its checksum says.",
        file="kvbm/tiers/disk/transfers.py",
        old="is_good = found == transfer.checksums[position]",
        new="is_good = True",
        fails="tests/disk/test_corruption.py",
    ),
    Mutant(
        name="disk-cache-is-not-marked-as-used",
        bug="a cache counts as unused since its engine was started, and is the first to go",
        file="kvbm/tiers/disk/index_thread.py",
        old="self._instance.touch()",
        new="pass",
        fails="tests/disk/test_storage.py -k blocks_move",
    ),
    Mutant(
        name="disk-checksum-without-the-hash",
        bug="A checksum fits the bytes of a block whatever its hash is.",
        file="kvbm/tiers/disk/index.py",
        old=' ^ int.from_bytes(sequence_hash[:SEED_BYTES], "little")',
        new="",
        fails="tests/disk/test_disk_faults.py tests/disk/test_corruption.py",
    ),
    Mutant(
        name="disk-checksum-without-the-namespace",
        bug="The files of another model, whose blocks have the same hashes, pass the checksum.",
        file="kvbm/tiers/disk/index.py",
        old='int.from_bytes(namespace[:SEED_BYTES], "little") ^ ',
        new="",
        fails="tests/disk/test_corruption.py -k another_model",
    ),
    Mutant(
        name="disk-cache-of-another-model-is-taken-over",
        bug="An instance in the directory of a model is used whatever model its superblock names.",
        file="kvbm/tiers/disk/instance.py",
        old="if former.namespace != self.superblock.namespace:",
        new="if False:",
        fails="tests/disk/test_corruption.py -k another_model",
    ),
    Mutant(
        name="disk-does-not-wait-for-a-predecessor",
        bug="A restarted engine creates an empty cache while the process of its predecessor is exiting.",
        file="kvbm/tiers/disk/directory.py",
        old="    while is_locked(predecessor):",
        new="    while False:",
        fails="tests/disk/test_client.py -k predecessor",
    ),
    Mutant(
        name="disk-fails-tickets-of-a-living-process",
        bug="Tickets fail when the channel ends, although the process may still write into host memory.",
        file="kvbm/child/service.py",
        old="        if not (is_expected or is_gone(self.pid)):",
        new="        if False:",
        fails="tests/child/test_service.py -k broken_channel",
    ),
    Mutant(
        name="disk-clear-is-not-flushed",
        bug="A clear is committed, but a power cut takes it back.",
        file="kvbm/tiers/disk/index.py",
        old='self._connection.execute("PRAGMA synchronous=FULL")',
        new='self._connection.execute("PRAGMA synchronous=NORMAL")',
        fails="tests/disk/test_crashes.py -k survive_a",
    ),
    Mutant(
        name="disk-clear-misses-what-is-in-flight",
        bug="A write that was under way when all was cleared is committed after it.",
        file="kvbm/tiers/disk/index_thread.py",
        old="for transfer in (*self._in_flight, *written, *started):",
        new="for transfer in started:",
        fails="tests/disk/test_disk_faults.py -k clear",
    ),
    Mutant(
        name="disk-commits-before-the-flush",
        bug="Rows are committed although the flush of their bytes has failed.",
        file="kvbm/tiers/disk/index_thread.py",
        old="""\
            for transfer in written:
                transfer.fail(f"flush: {error}")
""",
        new="",
        fails="tests/disk/test_disk_faults.py -k flush",
    ),
    Mutant(
        name="disk-commits-lost-bytes",
        bug="A write is committed although its host slots have lost their bytes.",
        file="kvbm/tiers/disk/index_thread.py",
        old="if not (self._slots_carry is None or self._slots_carry(order.host_slots, order.generations)):",
        new="if False:",
        fails="tests/disk/test_disk_faults.py -k lost_their_bytes",
    ),
    Mutant(
        name="disk-failed-start-keeps-the-space",
        bug="A start that fails leaves what it has taken.",
        file="kvbm/tiers/disk/files.py",
        old="""\
            with suppress(OSError):
                os.ftruncate(self.fd, min(before, length))
""",
        new="",
        fails='tests/disk/test_directory.py -k "space_back or as_it_was"',
    ),
    Mutant(
        name="disk-follows-links",
        bug="A file of a cache may be a link to somewhere else.",
        file="kvbm/tiers/disk/files.py",
        old="return private_file(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600), path)",
        new="return private_file(os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600), path)",
        fails="tests/disk/test_directory.py -k link",
    ),
    Mutant(
        name="disk-forgets-the-debts",
        bug="What could not be deleted is not deleted later.",
        file="kvbm/tiers/disk/index_thread.py",
        old="self._slots_to_delete = slots if error else set()",
        new="self._slots_to_delete = set()",
        fails="tests/disk/test_disk_faults.py -k forgotten_later",
    ),
    Mutant(
        name="disk-gds-is-tried-anywhere",
        bug="GPUDirect Storage is tried where its driver hangs.",
        file="kvbm/tiers/disk/io/select.py",
        old="complaint = (why_no_gds() if queue == GDS else None) or try_nixl(directory, queue)",
        new="complaint = trial(directory, queue)",
        fails="tests/disk/test_select.py",
    ),
    Mutant(
        name="disk-older-row-of-a-hash-counts",
        bug="Of two rows with one hash, the older one is taken for where the block is.",
        file="kvbm/tiers/disk/instance.py",
        old='positions = positions[np.argsort(found.generations[positions], kind="stable")]',
        new='positions = positions[np.argsort(-found.generations[positions], kind="stable")]',
        fails="tests/disk/test_corruption.py",
    ),
    Mutant(
        name="disk-overwrites-what-is-still-named",
        bug="The rows of a slot stay in the index while its bytes change.",
        file="kvbm/tiers/disk/index_thread.py",
        old="union(*overwritten, *",
        new="union(*",
        fails="tests/disk/test_crashes.py -k named_points --timeout 170",
    ),
    Mutant(
        name="disk-failed-read-is-damage",
        bug="A read that failed, as on a disk that hangs, counts as proof that its blocks are damaged.",
        file="kvbm/tiers/disk/storage.py",
        old="for position, bad in enumerate(transfer.is_damaged) if bad)",
        new="for position, good in enumerate(transfer.is_good) if not good)",
        fails="tests/disk/test_disk_faults.py -k proves_nothing",
    ),
    Mutant(
        name="disk-lost-host-memory-is-damage",
        bug="A block whose host slot is lost during the read counts as damaged.",
        file="kvbm/tiers/disk/transfers.py",
        old="if not is_good and not self._is_intact(transfer, position):",
        new="if not is_good:",
        fails="tests/disk/test_disk_faults.py -k host_memory_is_lost",
    ),
    Mutant(
        name="disk-short-count-is-enough",
        bug="What the kernel did in part counts as all.",
        file="kvbm/tiers/disk/io/threads.py",
        old="buffers = _rest(buffers, count)",
        new="return offset",
        fails="tests/disk/test_disk_faults.py -k short",
    ),
    Mutant(
        name="disk-stall-holds-what-waits",
        bug="What waits behind a disk that hangs is not ended.",
        file="kvbm/tiers/disk/storage.py",
        old="""\
        self._threads.fail_waiting("the disk hangs")
""",
        new="",
        fails="tests/disk/test_disk_faults.py -k turns_it_off_until --timeout 20",
    ),
    Mutant(
        name="disk-tells-the-last-found-again",
        bug="the last of what was found at opening is told again and again",
        file="kvbm/tiers/disk/storage.py",
        old="self._found = NOTHING if is_last else tuple(",
        new="self._found = self._found if is_last else tuple(",
        fails="tests/disk/test_storage.py -k told_some_at_a_time",
    ),
    Mutant(
        name="disk-writes-although-rows-stay",
        bug="A write goes on although the rows of its slots could not be deleted.",
        file="kvbm/tiers/disk/index_thread.py",
        old="if error is None:",
        new="if True:",
        fails="tests/disk/test_disk_faults.py -k cannot_be_deleted",
    ),
    Mutant(
        name="disk-writes-go-first",
        bug="Reads wait behind all writes.",
        file="kvbm/tiers/disk/transfers.py",
        old="piece = (self._reads or self._writes).popleft()",
        new="piece = (self._writes or self._reads).popleft()",
        fails="tests/disk/test_disk_faults.py -k reads_go_before",
    ),
    Mutant(
        name="disk-ends-a-ticket-with-running-io",
        bug="A ticket ends although the end of its I/O could not be detected.",
        file="kvbm/tiers/disk/transfers.py",
        old="""\
                with self._changed:
                    del self._running[me]
                continue
            except BaseException""",
        new="""\
                with self._changed:
                    del self._running[me]
                self._end(piece, str(error))
                continue
            except BaseException""",
        fails="tests/disk/test_disk_faults.py -k end_cannot_be_detected",
    ),
    Mutant(
        name="disk-nixl-repeats-a-failed-transfer",
        bug="A transfer of NIXL that has failed is repeated while parts of it may still be running.",
        file="kvbm/tiers/disk/io/nixl.py",
        old="""\
        if not has_ended:
            _never""",
        new="""\
        if False:
            _never""",
        fails="tests/disk/test_nixl.py -k not_repeated",
    ),
    Mutant(
        name="disk-trusts-generations",
        bug="A row with the largest generation leaves none for later writes.",
        file="kvbm/tiers/disk/instance.py",
        old=" & (found.generations <= MAX_GENERATION)",
        new="",
        fails="tests/disk/test_corruption.py -k cannot_be",
    ),
    Mutant(
        name="disk-unusable-cache-ends-the-start",
        bug="A cache whose files cannot be used ends the start of the engine.",
        file="kvbm/tiers/disk/instance.py",
        old="""\
            except EnvironmentProblem as error:
                unusable_count += 1
""",
        new="""\
            except EnvironmentProblem as error:
                raise
""",
        fails="tests/disk/test_directory.py -k others_may_read",
    ),
    Mutant(
        name="disk-unforeseen-damage-ends-the-start",
        bug="An exception that nothing foresees, while a cache is opened, ends the start of the engine.",
        file="kvbm/tiers/disk/instance.py",
        old="            except Exception:  # a damage that nothing foresees",
        new="            except MemoryError:  # a damage that nothing foresees",
        fails="tests/disk/test_directory.py -k unforeseen",
    ),
    Mutant(
        name="disk-damaged-schema-is-an-exception",
        bug="A message of SQLite that cannot be decoded is no sqlite3.Error.",
        file="kvbm/tiers/disk/index.py",
        old="        except UnicodeDecodeError as error:",
        new="        except KeyError as error:",
        fails="tests/disk/test_corruption.py -k schema_is_not_text",
    ),
    Mutant(
        name="doctor-believes-fcntl",
        bug="O_DIRECT is relied on where only fcntl takes it, which never asks a FUSE filesystem.",
        file="kvbm_cli/doctor/probes/disk.py",
        old="takes_open = by_open.works",
        new="takes_open = by_open.works or by_fcntl.works",
        fails="tests/doctor/test_disk_probe.py -k recommended",
    ),
    Mutant(
        name="doctor-compares-nothing",
        bug="What is read back is not compared with what was written.",
        file="kvbm_cli/doctor/probes/disk_file.py",
        old="if out[:] != back[:]:",
        new="if len(out) != len(back):",
        fails="tests/doctor/test_disk_probe.py -k wrong_bytes",
    ),
    Mutant(
        name="doctor-forgets-the-name",
        bug="A file that must have a name for an instant keeps it.",
        file="kvbm_cli/doctor/probes/disk_file.py",
        old="os.unlink(path)",
        new="pass",
        fails="tests/doctor/test_disk_probe.py -k name",
    ),
    Mutant(
        name="doctor-takes-all-the-space",
        bug="The trial is bounded by the free space, not by a tenth of it.",
        file="kvbm_cli/doctor/probes/disk.py",
        old="free = report.free_bytes // SHARE_OF_FREE if report.total_bytes else UNKNOWN_SPACE_BYTES",
        new="free = report.free_bytes if report.total_bytes else UNKNOWN_SPACE_BYTES",
        fails="tests/doctor/test_disk_probe.py -k tenth",
    ),
    Mutant(
        name="lasting-disk-takes-any-cache",
        bug="the next disk process takes over a cache that a clear of this engine has not reached",
        file="kvbm/tiers/disk/instance.py",
        old="            if only not in (None, path):\n",
        new="            if False:\n",
        fails="tests/disk/test_supervisor.py -k other_cache",
    ),
    Mutant(
        name="disk-process-opens-in-silence",
        bug="a disk cache that takes long to open is taken for a process that does not answer",
        file="kvbm/child/child.py",
        old="                send(Opening())\n",
        new="                continue\n",
        fails="tests/disk/test_client.py -k heartbeats",
    ),
    Mutant(
        name="disk-forgets-a-clear-before-its-start",
        bug="blocks on a disk that answers after a reset are served",
        file="kvbm/tiers/disk/service/client.py",
        old="            self._clears_first = True\n",
        new="",
        fails="tests/embedded/test_disk_in_engine.py -k answers_after",
    ),
    Mutant(
        name="disk-that-hangs-holds-up-a-start",
        bug="an engine waits for a disk until it answers",
        file="kvbm/child/first_opening.py",
        old="if time.monotonic() > self._until_s and not self._end.done():",
        new="if False:",
        fails="tests/embedded/test_disk_in_engine.py -k does_not_answer",
    ),
    Mutant(
        name="disk-in-a-bad-state-ends-the-start",
        bug="an engine whose disk is full, or a link, does not start",
        file="kvbm/child/first_opening.py",
        old="self._is_awaited and not isinstance(error, TierProblem)",
        new="self._is_awaited",
        fails="tests/leader/test_late_identity.py -k something_else",
    ),
    Mutant(
        name="disk-of-a-living-engine-is-reclaimed",
        bug="the cache of an engine is removed while its killed disk process is replaced",
        file="kvbm/tiers/disk/directory.py",
        old="None if _has_living_engine(instance) else InstanceLock.take(instance)",
        new="InstanceLock.take(instance)",
        fails="tests/disk/test_supervisor.py -k living_engine",
    ),
    Mutant(
        name="tiers-that-hang-hold-up-a-start-one-after-the-other",
        bug="a start with two tiers that hang takes two deadlines",
        file="kvbm/engines/opening.py",
        old="                begun.append(tier)\n",
        new="                begun.append(tier)\n                tier[0].await_opening()\n",
        fails="tests/leader/test_late_identity.py -k as_long_as_one",
    ),
    Mutant(
        name="auto-shrinks-a-cache-at-a-restart",
        bug="a cache that has taken the free space finds little at the next start, and drops its blocks",
        file="kvbm/tiers/disk/instance.py",
        old="    if settings.fit and former is not None:",
        new="    if settings.fit and former is not None and former.slot_count == 0:",
        fails="tests/disk/test_size.py -k keeps_its_size",
    ),
)
