"""Bugs in loads: what is read from disk and host memory for a request, and when its end is reported."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="loads-report-before-the-last-slice",
        bug="a long load is reported while slices of it have not begun",
        file="kvbm/leader/onboards.py",
        old="if load.open_parts or load.waiting or load.slices:",
        new="if load.open_parts or load.waiting:",
        fails="tests/leader/test_long_chains.py",
    ),
    Mutant(
        name="loads-go-on-after-their-request",
        bug="slices of a load are copied into G1 blocks that the engine has given to another request",
        file="kvbm/leader/leader.py",
        old="        self._onboards.end_request(request)\n",
        new="",
        fails="tests/leader/test_long_chains.py",
    ),
    Mutant(
        name="loads-take-no-turns",
        bug="a second long load waits for the end of the first",
        file="kvbm/leader/onboards.py",
        old="                self._in_slices.append(load)\n            self._open",
        new="                self._in_slices.appendleft(load)\n            self._open",
        fails="tests/leader/test_long_chains.py",
    ),
    Mutant(
        name="loads-use-another-match",
        bug="a load takes the slots of a match of other blocks",
        file="kvbm/leader/onboards.py",
        old="is_valid &= first >= last or blocks.hashes[last - first - 1] == hashes[last - 1]",
        new="is_valid &= True",
        fails="tests/leader/test_long_chains.py",
    ),
    Mutant(
        name="match-survives-a-reset",
        bug="a long match continues with blocks that were forgotten",
        file="kvbm/leader/long_matches.py",
        old="return self._losses == self._count_losses()",
        new="return True",
        fails="tests/leader/test_long_chains.py",
    ),
    Mutant(
        name="match-leaks-its-pins",
        bug="what a long match found stays pinned after the end of its request",
        file="kvbm/leader/long_matches.py",
        old="                self._slices.release(blocks)",
        new="                pass",
        fails="tests/leader/test_long_chains.py",
    ),
    Mutant(
        name="leader-gives-up-again-and-again",
        bug="an overdue load is reported as failed at every step",
        file="kvbm/leader/onboards.py",
        old="""\
        load.is_reported = True
""",
        new="",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-keeps-blocks-of-a-failed-load",
        bug="blocks whose load failed stay findable",
        file="kvbm/leader/onboards.py",
        old="self._host.store.forget(copy.source.hashes)",
        new="pass",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-kept-awake-by-a-hung-copy",
        bug="a hung copy keeps the engine stepping for ever",
        file="kvbm/leader/onboards.py",
        old="return youngest is not None and self._step - youngest.born_step <= within_steps",
        new="return youngest is not None",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-onboard-without-hold",
        bug="the blocks that an onboard writes are not held",
        file="kvbm/leader/onboards.py",
        old="""\
        self._block_pool.hold(block_ids)
""",
        new="",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-releases-what-it-gave-up",
        bug="the blocks of an overdue load are released while its copier may write them",
        file="kvbm/leader/onboards.py",
        old="""\
            self._fail(copy.load)
""",
        new="""\
            self._fail(copy.load)
            self._block_pool.release(copy.order.block_ids)
""",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-reset-lets-loads-land",
        bug="a load in flight at a reset is reported as good",
        file="kvbm/leader/onboards.py",
        old="self._end_copy(copy, is_ready=result is SlotState.READY and not copy.is_void)",
        new="self._end_copy(copy, is_ready=result is SlotState.READY)",
        fails="tests/leader",
    ),
    Mutant(
        name="loads-cut-behind-a-missing-block",
        bug="blocks behind one that has not come are the engine's",
        file="kvbm/leader/onboards.py",
        old="if load.number not in missing or part.first < missing[load.number][0].first:",
        new="if load.number not in missing:",
        fails="tests/leader",
    ),
    Mutant(
        name="loads-cut-what-is-before-too",
        bug="a load that is cut lets go of reads that come before the cut",
        file="kvbm/leader/onboards.py",
        old="""\
        own = [(fetch, part) for fetch, (other, part) in self._fetches.items() if other is load and part.first >= end]
""",
        new="""\
        own = [(fetch, part) for fetch, (other, part) in self._fetches.items() if other is load]
""",
        fails="tests/leader/test_disk_tier.py",
    ),
    Mutant(
        name="loads-fail-behind-what-has-come",
        bug="a read that fails costs a request also what has come before it",
        file="kvbm/leader/onboards.py",
        old="                self._close(load, part.block_ids)\n                self._cut(load, part.first)",
        new="                self._close(load, part.block_ids)\n                self._fail(load)",
        fails="tests/leader/test_disk_tier.py -k read_fails",
    ),
    Mutant(
        name="loads-read-more-than-host-memory-has-room-for",
        bug="a read asks for more room than host memory may ever have",
        file="kvbm/leader/disk_tier.py",
        old="size = max(1, min(self._settings.batch_blocks, len(positions) // PARTS, share))",
        new="size = max(1, min(self._settings.batch_blocks, len(positions) // PARTS))",
        fails="tests/leader",
    ),
    Mutant(
        name="loads-report-after-the-first-part",
        bug="a load is reported as ended when its first part has ended",
        file="kvbm/leader/onboards.py",
        old="if load.open_parts or load.waiting or load.slices:",
        new="if load.waiting or load.slices:",
        fails="tests/leader",
    ),
    Mutant(
        name="loads-wait-for-a-disk-that-is-off",
        bug="a load waits until its time is over for a disk that is off",
        file="kvbm/leader/onboards.py",
        old="        if not tier.is_on:\n            return True\n",
        new="",
        fails="tests/leader/test_disk_tier.py -k waits_for_room",
    ),
    Mutant(
        name="rates-wait-for-ever",
        bug="a read that has become hopeless is waited for",
        file="kvbm/leader/rates.py",
        old="return waited_s > blocks * compute_s + max(GRACE * of_blocks * compute_s, GRACE_S)",
        new="return False",
        fails="tests/leader",
    ),
    Mutant(
        name="loads-wait-for-room-without-a-deadline",
        bug="a load without room waits for the hung reads of others",
        file="kvbm/leader/onboards.py",
        old="load.has_hung(min(waited_s, self._idle_s) if read is None else read.idle_s, tier.reads)",
        new="load.has_hung(0.0 if read is None else read.idle_s, tier.reads)",
        fails="tests/leader/test_hanging_tiers.py",
    ),
    Mutant(
        name="loads-have-a-deadline-per-read",
        bug="a load whose reads hang one after the other waits for each of them",
        file="kvbm/leader/request.py",
        old="            self.lost_s += self.idle_s\n",
        new="            pass\n",
        fails="tests/leader/test_hanging_tiers.py",
    ),
    Mutant(
        name="loads-follow-one-that-was-given-up",
        bug="a request that waited for a load that was given up waits for the same tier again",
        file="kvbm/leader/matching.py",
        old="request.may_read_lower &= not self._onboards.has_given_up(request.awaited)",
        new="request.may_read_lower &= True",
        fails="tests/leader/test_hanging_tiers.py",
    ),
    Mutant(
        name="reads-that-hang-take-all-of-host-memory",
        bug="reads that never end leave no room for anything else",
        file="kvbm/leader/open_reads.py",
        old="return not self._open or (",
        new="return True or (",
        fails="tests/leader/test_hanging_tiers.py",
    ),
    Mutant(
        name="reads-that-hang-are-followed-by-others",
        bug="a tier with a read that hangs is read from",
        file="kvbm/leader/open_reads.py",
        old="return self._hung > 0",
        new="return False",
        fails="tests/leader/test_hanging_tiers.py",
    ),
    Mutant(
        name="reads-that-hang-are-hidden-by-later-ones",
        bug="one read that never ends is waited for as long as others end",
        file="kvbm/leader/open_reads.py",
        old="later.has_moved |= other > ticket",
        new="later.has_moved = True",
        fails="tests/leader/test_hanging_tiers.py",
    ),
    Mutant(
        name="loads-that-cannot-begin-keep-their-pins",
        bug="blocks on disk stay pinned for a load that did not begin",
        file="kvbm/leader/onboards.py",
        old="        self._release_kept(load)\n        return False\n",
        new="        return False\n",
        fails="tests/leader/test_disk_tier.py -k cannot_begin",
    ),
    Mutant(
        name="reads-are-unknown-to-the-other-tiers",
        bug="blocks that come from the shared tier are never written to disk",
        file="kvbm/leader/open_reads.py",
        old="if other is not self._tier:",
        new="if False:",
        fails="tests/leader/test_shared_tier.py -k have_come_go_to_disk",
    ),
)
