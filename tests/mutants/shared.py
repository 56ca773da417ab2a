"""Bugs in the storage of the shared tier, its object format and its process."""

from __future__ import annotations

from mutant import Mutant

CONTRACT = "tests/shared/test_shared_contract.py"
FAULTS = "tests/shared/test_shared_faults.py"
SERVICE = "tests/shared/test_shared_service.py"
COPIES = "tests/shared/test_node_copies.py"

PLANTED = "tests/cli/test_planted_stores.py"

MUTANTS = (
    Mutant(
        name="store-links-are-followed",
        bug="a link in a directory store is followed: a purge deletes somebody's files",
        file="kvbm/host/tree.py",
        old="RESOLVE = RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH",
        new="RESOLVE = 0",
        fails=f"{PLANTED} -k becomes_a_link",
    ),
    Mutant(
        name="store-links-are-followed-without-openat2",
        bug="on an older kernel, a link in a directory store is followed",
        file="kvbm/host/tree.py",
        old="os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=holder)",
        new="os.open(name, flags & ~os.O_NOFOLLOW, mode, dir_fd=holder)",
        fails=f"{PLANTED} -k becomes_a_link",
    ),
    Mutant(
        name="engine-reads-through-links",
        bug="an engine loads an object from behind a link that somebody has put into the store",
        file="kvbm/tiers/shared/stores/directory.py",
        old="read_file(root.open_file(one.key), one)",
        new="read_file(os.open(self._root / one.key, os.O_RDONLY), one)",
        fails=f"{PLANTED} -k neither_reads",
    ),
    Mutant(
        name="store-deletes-by-path",
        bug="a directory that became a link after the listing is entered: a purge deletes somebody's files",
        file="kvbm_cli/store/directory_access.py",
        old="                    root.unlink_file(key)\n",
        new="                    os.unlink(self._root / key)\n",
        fails=f"{PLANTED} -k becomes_a_link",
    ),
    Mutant(
        name="store-part-unread-is-not-said",
        bug="a namespace that cannot be read is passed over, and the command succeeds",
        file="kvbm_cli/store/inventory.py",
        old="        self.failure_count += one.is_failure\n",
        new="",
        fails=f"{PLANTED} -k cannot_be_read",
    ),
    Mutant(
        name="object-checksum-is-not-compared",
        bug="a block with a changed byte counts as good",
        file="kvbm/tiers/shared/geometry.py",
        old="(found or self._checksums(order)) != expected",
        new="False",
        fails=f"{CONTRACT} -k damaged_object",
    ),
    Mutant(
        name="object-length-is-not-compared",
        bug="an object that became longer is taken",
        file="kvbm/tiers/shared/object_store.py",
        old='return None if size == one.length else StoreAnswer(Outcome.BAD, f"{size} bytes, not {one.length}")',
        new="return None",
        fails=f"{CONTRACT} -k damaged_object",
    ),
    Mutant(
        name="object-first-listing-is-lost",
        bug="what comes right behind the answer to the start is dropped: a new engine does not know the store",
        file="kvbm/child/service.py",
        old="""\
            for message in received:
                self._handle(message)
            if self._is_open:
                return
""",
        new="""\
            for message in received:
                self._handle(message)
                if self._is_open:
                    return
""",
        fails=f"{SERVICE} -k listing_that_comes",
    ),
    Mutant(
        name="object-first-listing-waits",
        bug="the process says what the store has when it looks around next, after the first request",
        file="kvbm/tiers/shared/service/server.py",
        old="        self._report()  # the first listing may be there already\n",
        new="",
        fails=f"{SERVICE} -k first_listing_comes",
    ),
    Mutant(
        name="object-listings-pile-up",
        bug="listings are sent to an engine that does not take them: its next step takes seconds",
        file="kvbm/tiers/shared/service/server.py",
        old="        self._is_listing_on_its_way = True\n",
        new="",
        fails=f"{SERVICE} -k gets_one_listing",
    ),
    Mutant(
        name="object-full-store-is-not-read",
        bug="failed writes count as a store that does not answer",
        file="kvbm/tiers/shared/storage.py",
        old="        if result.outcome is Outcome.FAILED and is_write:\n",
        new="        if False:\n",
        fails="tests/shared/test_store_breaks.py -k reads_go_on",
    ),
    Mutant(
        name="object-bad-file-is-a-bad-store",
        bug="a file that cannot be read counts as a store that does not answer",
        file="kvbm/tiers/shared/stores/directory.py",
        old="            if error.errno not in (errno.ENOENT, *OF_ONE_FILE) or not self._is_mounted():",
        new="            if error.errno != errno.ENOENT:",
        fails="tests/shared/test_store_breaks.py -k cannot_be_read",
    ),
    Mutant(
        name="object-stuck-call-keeps-the-tier-off",
        bug="a call that never returns turns the tier off again and again",
        file="kvbm/tiers/shared/storage.py",
        old="            self._stuck_s = max(stuck)\n",
        new="",
        fails="tests/shared/test_store_breaks.py -k never_returns",
    ),
    Mutant(
        name="usage-names-tokens-that-did-not-come",
        bug="after a load that failed in part, usage names tokens of the shared tier that never came",
        file="kvbm/engines/embedded/engine/scheduler.py",
        old="        self._register_computed(request)\n        if self._connector is not None:\n",
        new="        self._register_computed(request)\n        if False:\n",
        fails="tests/embedded/test_engines_share_a_directory.py -k not_reported",
    ),
    Mutant(
        name="object-secret-changes-under-a-namespace",
        bug="a process that starts again uses another secret in the old namespace",
        file="kvbm/tiers/shared/service/server.py",
        old="protection.namespace(order.digest) != order.namespace",
        new="False",
        fails=f"{SERVICE} -k another_secret",
    ),
    Mutant(
        name="object-order-wakes-nobody",
        bug="an order waits until a thread looks for itself",
        file="kvbm/tiers/shared/storage.py",
        old="            self._has_order.notify()\n",
        new="",
        fails=f"{CONTRACT} -k order_does_not_wait",
    ),
    Mutant(
        name="object-secret-is-not-in-its-namespace",
        bug="engines with different secrets replace each other's objects for ever",
        file="kvbm/tiers/shared/protection.py",
        old='        return self._key(b" namespace", digest)[: len(digest)]',
        new="        return digest",
        fails="tests/embedded/test_engines_share_a_directory.py -k secrets",
    ),
    Mutant(
        name="object-half-of-a-file-stays",
        bug="a write that failed in the middle leaves a file",
        file="kvbm/tiers/shared/stores/directory.py",
        old="            with suppress(OSError):\n                os.unlink(staged, dir_fd=at)\n            raise\n",
        new="            raise\n",
        fails="tests/shared/test_directory_store.py -k fails_in_the_middle",
    ),
    Mutant(
        name="object-file-is-replaced",
        bug="a file that another engine has written at the same time is replaced",
        file="kvbm/tiers/shared/stores/directory.py",
        old="            if not creates:\n                os.replace(staged, name",
        new="            if True:\n                os.replace(staged, name",
        fails="tests/shared/test_directory_store.py -k one_creates_it",
    ),
    Mutant(
        name="object-arriving-bytes-are-not-hashed",
        bug="checksums of arriving bytes leave out what comes after the first part",
        file="kvbm/tiers/shared/geometry.py",
        old="        if self._position != self._block_bytes * len(self._hashers):\n            return None\n",
        new="",
        fails=f"{CONTRACT} -k byte_for_byte",
    ),
    Mutant(
        name="object-limit-stays-after-timeouts",
        bug="a store that has become slower for good is never used again",
        file="kvbm/tiers/shared/stores/request_limit.py",
        old="if took_s < limit_s or self.seconds != limit_s:",
        new="if True:",
        fails=f"{FAULTS} -k 'become_slower and moto'",
    ),
    Mutant(
        name="object-seal-is-not-compared",
        bug="an object of somebody without the secret is taken",
        file="kvbm/tiers/shared/protection.py",
        old="return payload if hmac.compare_digest(expected, seal) else None",
        new="return payload",
        fails=f"{CONTRACT} -k protected_run",
    ),
    Mutant(
        name="object-written-without-its-rank",
        bug="blocks are written although their rank has ended",
        file="kvbm/tiers/shared/storage.py",
        old="if self._slots_carry(order.host_slots, order.generations):",
        new="if True:",
        fails=f"{CONTRACT} -k rank_ended",
    ),
    Mutant(
        name="object-probe-skips-gaps",
        bug="a probe counts runs behind one that is absent",
        file="kvbm/tiers/shared/storage.py",
        old="                    high = position\n                    break\n",
        new="                    continue\n",
        fails=f"{CONTRACT} -k probe_finds",
    ),
    Mutant(
        name="object-breaker-never-opens",
        bug="every order waits for a store that does not answer",
        file="kvbm/tiers/shared/breaker.py",
        old="if self.why is None and self._failures >= FAILURES_IN_A_ROW:",
        new="if False:",
        fails=f"{FAULTS} -k 'every_fault and unavailable'",
    ),
    Mutant(
        name="object-breaker-never-closes",
        bug="the tier stays off after the store answers again",
        file="kvbm/tiers/shared/breaker.py",
        old="                self.why, self._failures = None, 0\n",
        new="                pass\n",
        fails=f"{FAULTS} -k 'every_fault and unavailable'",
    ),
    Mutant(
        name="object-missing-bucket-is-a-miss",
        bug="an engine starts with a bucket that does not exist",
        file="kvbm/tiers/shared/stores/obstore.py",
        old="            with translated():\n"
        "                for _ in obstore.list(self._store, chunk_size=1):  # a missing bucket is an error here\n"
        "                    break\n",
        new="",
        fails=f"{FAULTS} -k missing_bucket",
    ),
    Mutant(
        name="object-url-shows-its-password",
        bug="a URL with credentials is accepted and logged",
        file="kvbm/tiers/shared/stores/obstore.py",
        old="if parts.password is not None:",
        new="if False:",
        fails=f"{FAULTS} -k password",
    ),
    Mutant(
        name="object-process-end-loses-orders",
        bug="orders of a process that was killed never end",
        file="kvbm/child/service.py",
        old="""\
        self.off_because = f"the {self.tier} process has exited"
        self._fail_in_flight()
""",
        new="""\
        self.off_because = f"the {self.tier} process has exited"
""",
        fails=f"{SERVICE} -k killed_process",
    ),
    Mutant(
        name="object-process-silence-is-not-seen",
        bug="a process that is stopped keeps the tier on",
        file="kvbm/child/service.py",
        old="self.is_silent = is_due and now - self._answered_s() > deadlines.ANSWER_LIMIT_S",
        new="self.is_silent = False",
        fails=f"{SERVICE} -k stopped_process",
    ),
    Mutant(
        name="node-copy-that-is-bad-is-a-miss",
        bug="a damaged copy is not read again from the store",
        file="kvbm/tiers/shared/storage.py",
        old="if result.outcome is Outcome.BAD and answer.is_copy:",
        new="if False:",
        fails=f"{COPIES} -k flipped",
    ),
    Mutant(
        name="node-copy-lacks-what-was-skipped",
        bug="a copy has no content where its reader skipped blocks",
        file="kvbm/tiers/shared/stores/node_copies.py",
        old="has_gaps = len(buffers) < len(one.buffers)",
        new="has_gaps = False",
        fails=f"{COPIES} -k skipped",
    ),
    Mutant(
        name="node-copy-is-not-awaited",
        bug="engines that read at the same time all ask the store",
        file="kvbm/tiers/shared/stores/node_copies.py",
        old="waits = keeps and not one.is_fresh and began_s >= self._patient_from_s",
        new="waits = False",
        fails=f"{COPIES} -k requested_once",
    ),
    Mutant(
        name="node-copy-is-new",
        bug="an object that is about to expire looks new, and is not written again",
        file="kvbm/tiers/shared/stores/node_copies.py",
        old="time.time() - age_s))",
        new="time.time()))",
        fails=f"{COPIES} -k as_old",
    ),
    Mutant(
        name="node-copy-is-read-into-memory-in-use",
        bug="a read of a copy that was given up changes what the request has read from the store meanwhile",
        file="kvbm/tiers/shared/stores/node_copies.py",
        old="answer = read_file(descriptor, Incoming(name, [content], one.length))",
        new="answer = read_file(descriptor, one)",
        fails=f"{COPIES} -k ends_late",
    ),
    Mutant(
        name="node-copy-is-kept-too-late",
        bug="a copy has bytes that its buffers got after the end of the request",
        file="kvbm/tiers/shared/stores/node_copies.py",
        old="if is_late.is_set():",
        new="if False:",
        fails=f"{COPIES} -k ends_late",
    ),
    Mutant(
        name="node-copies-hang",
        bug="reads from the store wait for a disk directory that hangs",
        file="kvbm/host/limited_calls.py",
        old="0.0 if self._has_late() else self.limit_s",
        new="4.0",
        fails=f"{COPIES} -k costs_nothing",
    ),
    Mutant(
        name="node-copy-of-another-store",
        bug="an engine reads the copy of an object in another store",
        file="kvbm/tiers/shared/stores/node_copies.py",
        old='f"{self._url}\\0{key}"',
        new='f"{key}"',
        fails=f"{COPIES} -k not_confused",
    ),
    Mutant(
        name="shared-probe-reads-nothing",
        bug="a store whose reads hang counts as working, because its directory can be listed",
        file="kvbm/tiers/shared/stores/directory.py",
        old="                    _read_all(root.open_file(key))\n",
        new="                    pass\n",
        fails="tests/shared/test_store_breaks.py",
    ),
    Mutant(
        name="shared-probe-likes-a-bare-mount-point",
        bug="the empty directory below a file system that is gone counts as a store that works",
        file="kvbm/tiers/shared/stores/directory.py",
        old="        if not self._is_mounted():\n            return f",
        new="        if False:\n            return f",
        fails="tests/shared/test_store_breaks.py",
    ),
    Mutant(
        name="shared-process-with-a-hung-read-stays",
        bug="a process whose read never ends keeps its host memory for good",
        file="kvbm/tiers/shared/service/client.py",
        old="return min(self._heard_s, self._moved_s) if self._reads else self._heard_s",
        new="return self._heard_s",
        fails="tests/shared/test_shared_service.py -k never_ends",
    ),
)
