"""Bugs in the leader's side of the shared tier."""

from __future__ import annotations

from mutant import Mutant

FILE = "kvbm/tiers/shared/tier.py"
TESTS = "tests/leader/test_shared_tier.py"

MUTANTS = (
    Mutant(
        name="shared-read-that-failed-counts",
        bug="blocks of an object that was damaged or did not come are registered",
        file=FILE,
        old="if fetch.is_void or result.outcome is not Outcome.GOOD:",
        new="if fetch.is_void:",
        fails=f"{TESTS} -k cannot_be_read",
    ),
    Mutant(
        name="shared-presence-never-erased",
        bug="a run that could not be read is promised again and again",
        file=FILE,
        old="            self.presence.erase(name)",
        new="            pass",
        fails=f"{TESTS} -k deleted",
    ),
    Mutant(
        name="shared-process-end-forgets-everything",
        bug="runs are forgotten because the process ended while they were read",
        file=FILE,
        old="if result.outcome is not Outcome.FAILED or self.client.is_on:",
        new="if True:",
        fails=f"{TESTS} -k process_that_ends",
    ),
    Mutant(
        name="shared-last-run-never-written",
        bug="the last run of a request whose blocks arrive late is not written",
        file=FILE,
        old="        if due.is_repeated:",
        new="        if True:",
        fails=f"{TESTS} -k still_on_its_way",
    ),
    Mutant(
        name="shared-write-keeps-its-pins",
        bug="blocks stay pinned after they were written",
        file=FILE,
        old="        write.source.release()\n",
        new="",
        fails=f"{TESTS} -k pinned_while",
    ),
    Mutant(
        name="shared-run-begins-anywhere",
        bug="runs begin where a match begins, so that engines name different ones",
        file=FILE,
        old="stop = (start // size + 1) * size",
        new="stop = start + size",
        fails=f"{TESTS} -k only_what_is_missing",
    ),
    Mutant(
        name="shared-reset-is-forgotten",
        bug="after new weights, an engine goes on with objects of the old ones",
        file=FILE,
        old="        self._has_ended = True\n",
        new="",
        fails=f"{TESTS} -k after_a_reset",
    ),
    Mutant(
        name="shared-request-waits-for-ever",
        bug="a request is asked again until the store answers",
        file=FILE,
        old="is_over = asked.computed_steps >= WAIT_STEPS or self._clock() > asked.deadline_s",
        new="is_over = False",
        fails=f"{TESTS} -k waits_at_most",
    ),
    Mutant(
        name="shared-slow-store-is-asked",
        bug="requests wait for a store that never pays",
        file=FILE,
        old="if not self.is_on or not self._rates.may_pay(Tier.SHARED):",
        new="if not self.is_on:",
        fails=f"{TESTS} -k slower_than_computing",
    ),
    Mutant(
        name="shared-load-lacks-a-block",
        bug="a load begins although one of its blocks is nowhere",
        file="kvbm/leader/onboards.py",
        old="        self._release_kept(load)\n        return False\n",
        new="        return True\n",
        fails=f"{TESTS} -k left_host_memory_since",
    ),
    Mutant(
        name="shared-reader-writes",
        bug="an engine that may only read writes objects",
        file=FILE,
        old='if self._policy.writes != "never" and not',
        new="if not",
        fails=f"{TESTS} -k only_reads",
    ),
)
