"""Bugs in the storage of the shared tier, its object format and its process."""

from __future__ import annotations

from mutant import Mutant

CONTRACT = "tests/shared/test_shared_contract.py"
FAULTS = "tests/shared/test_shared_faults.py"
SERVICE = "tests/shared/test_shared_service.py"
COPIES = "tests/shared/test_node_copies.py"

MUTANTS = (
    Mutant(
        name="object-checksum-is-not-compared",
        bug="a block with a changed byte counts as good",
        file="kvbm/shared/geometry.py",
        old="self.form.checksum(name, self.block(slot)) != checksum",
        new="False",
        fails=f"{CONTRACT} -k damaged_object",
    ),
    Mutant(
        name="object-length-is-not-compared",
        bug="an object that became longer is taken",
        file="kvbm/shared/obstore_engine.py",
        old='return None if size == one.length else StoreAnswer(Outcome.BAD, f"{size} bytes, not {one.length}")',
        new="return None",
        fails=f"{CONTRACT} -k damaged_object",
    ),
    Mutant(
        name="object-first-listing-is-lost",
        bug="what comes right behind the answer to the start is dropped: a new engine does not know the store",
        file="kvbm/shared/service/client.py",
        old="                        self.received_early = received[position + 1 :]\n",
        new="",
        fails=f"{SERVICE} -k listing_that_comes",
    ),
    Mutant(
        name="object-order-wakes-nobody",
        bug="an order waits until a thread looks for itself",
        file="kvbm/shared/storage.py",
        old="            self._has_order.notify()\n",
        new="",
        fails=f"{CONTRACT} -k order_does_not_wait",
    ),
    Mutant(
        name="object-secret-is-not-in-its-namespace",
        bug="engines with different secrets replace each other's objects for ever",
        file="kvbm/shared/protection.py",
        old='        return _key(self._secret, b"hmac namespace", digest)[: len(digest)]',
        new="        return digest",
        fails="tests/engines/test_engines_share_a_directory.py -k secrets",
    ),
    Mutant(
        name="object-limit-stays-after-timeouts",
        bug="a store that has become slower for good is never used again",
        file="kvbm/shared/obstore_engine.py",
        old="if seconds >= limit_s and self._limit_s == limit_s:",
        new="if False:",
        fails=f"{FAULTS} -k 'become_slower and moto'",
    ),
    Mutant(
        name="object-seal-is-not-compared",
        bug="an object of somebody without the secret is taken",
        file="kvbm/shared/protection.py",
        old="return payload if hmac.compare_digest(expected, seal) else None",
        new="return payload",
        fails=f"{CONTRACT} -k protected_run",
    ),
    Mutant(
        name="object-written-without-its-rank",
        bug="blocks are written although their rank has ended",
        file="kvbm/shared/storage.py",
        old="if self._slots_carry(order.host_slots, order.generations):",
        new="if True:",
        fails=f"{CONTRACT} -k rank_ended",
    ),
    Mutant(
        name="object-probe-skips-gaps",
        bug="a probe counts runs behind one that is absent",
        file="kvbm/shared/storage.py",
        old="                    high = position\n                    break\n",
        new="                    continue\n",
        fails=f"{CONTRACT} -k probe_finds",
    ),
    Mutant(
        name="object-breaker-never-opens",
        bug="every order waits for a store that does not answer",
        file="kvbm/shared/breaker.py",
        old="if self.why is None and self._failures >= FAILURES_IN_A_ROW:",
        new="if False:",
        fails=f"{FAULTS} -k 'every_fault and unavailable'",
    ),
    Mutant(
        name="object-breaker-never-closes",
        bug="the tier stays off after the store answers again",
        file="kvbm/shared/breaker.py",
        old="                self.why, self._failures = None, 0\n",
        new="                pass\n",
        fails=f"{FAULTS} -k 'every_fault and unavailable'",
    ),
    Mutant(
        name="object-missing-bucket-is-a-miss",
        bug="an engine starts with a bucket that does not exist",
        file="kvbm/shared/obstore_engine.py",
        old="            for _ in obstore.list(self._store, chunk_size=1):  # a missing bucket is an error here\n"
        "                break\n",
        new="",
        fails=f"{FAULTS} -k missing_bucket",
    ),
    Mutant(
        name="object-url-shows-its-password",
        bug="a URL with credentials is accepted and logged",
        file="kvbm/shared/obstore_engine.py",
        old="if parts.password is not None:",
        new="if False:",
        fails=f"{FAULTS} -k password",
    ),
    Mutant(
        name="object-process-end-loses-orders",
        bug="orders of a process that was killed never end",
        file="kvbm/shared/service/client.py",
        old="        if not is_expected:\n            self._fail_in_flight()\n",
        new="",
        fails=f"{SERVICE} -k killed_process",
    ),
    Mutant(
        name="object-process-silence-is-not-seen",
        bug="a process that is stopped keeps the tier on",
        file="kvbm/shared/service/client.py",
        old="self.is_silent = quiet_s > ANSWER_LIMIT_S",
        new="self.is_silent = False",
        fails=f"{SERVICE} -k stopped_process",
    ),
    Mutant(
        name="node-copy-that-is-bad-is-a-miss",
        bug="a damaged copy is not read again from the store",
        file="kvbm/shared/storage.py",
        old="if result.outcome is Outcome.BAD and answer.is_copy:",
        new="if False:",
        fails=f"{COPIES} -k flipped",
    ),
    Mutant(
        name="node-copy-lacks-what-was-skipped",
        bug="a copy has no content where its reader skipped blocks",
        file="kvbm/shared/node_copies.py",
        old="has_gaps = len(buffers) < len(one.buffers)",
        new="has_gaps = False",
        fails=f"{COPIES} -k skipped",
    ),
    Mutant(
        name="node-copy-is-not-awaited",
        bug="engines that read at the same time all ask the store",
        file="kvbm/shared/node_copies.py",
        old="is_patient = not one.is_fresh and now >= self._patient_from_s",
        new="is_patient = False",
        fails=f"{COPIES} -k requested_once",
    ),
    Mutant(
        name="node-copy-is-new",
        bug="an object that is about to expire looks new, and is not written again",
        file="kvbm/shared/node_copies.py",
        old="time.time() - answer.age_s))",
        new="time.time()))",
        fails=f"{COPIES} -k as_old",
    ),
    Mutant(
        name="node-copy-of-another-store",
        bug="an engine reads the copy of an object in another store",
        file="kvbm/shared/node_copies.py",
        old='f"{self._url}\\0{key}"',
        new='f"{key}"',
        fails=f"{COPIES} -k not_confused",
    ),
)
