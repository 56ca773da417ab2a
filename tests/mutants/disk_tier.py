"""Bugs around the disk tier: the leader's side of it, its process, and a cache that lasts."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="disk-child-stays-without-its-files",
        bug="the disk process goes on with files that have been removed",
        file="kvbm/tiers/disk/service/server.py",
        old="if self._storage.health.is_removed:",
        new="if False:",
        fails="tests/disk/test_supervisor.py -k made_again",
    ),
    Mutant(
        name="disk-process-clear-misses-what-is-found",
        bug="a clear leaves what was found at opening and has not been taken over yet",
        file="kvbm/tiers/disk/service/client.py",
        old="""\
        self._found.clear()
        self._has_all_found = True
""",
        new="",
        fails="tests/disk/test_client.py -k not_told_yet",
    ),
    Mutant(
        name="disk-side-fills-all-at-once",
        bug="a step takes over everything that the next process has found, however long that takes",
        file="kvbm/tiers/disk/tier.py",
        old="self._fill(FILL_S)",
        new="self._fill(math.inf)",
        fails="tests/leader/test_disk_tier.py -k little_per_step",
    ),
    Mutant(
        name="disk-side-fills-slots-that-are-held",
        bug="what the next process has found is put into slots that a load still holds",
        file="kvbm/tiers/disk/tier.py",
        old="if counts.free + counts.inactive < self.store.capacity_blocks:",
        new="if counts.free + counts.inactive < 0:",
        fails="tests/leader/test_disk_tier.py -k still_holds",
    ),
    Mutant(
        name="disk-side-forgets-no-bad-block",
        bug="a block that could not be read is offered again",
        file="kvbm/tiers/disk/tier.py",
        old="self.store.forget([source.hashes[index] for index in result.damaged])",
        new="pass",
        fails="tests/leader",
    ),
    Mutant(
        name="disk-side-frees-a-slot-under-a-read",
        bug="the slot of a read that was given up is free while the read still writes to it",
        file="kvbm/tiers/open_reads.py",
        old="""\
        self.is_abandoned = True
""",
        new="""\
        self.is_abandoned = True
        self.target.release()
""",
        fails="tests/leader",
    ),
    Mutant(
        name="disk-side-hits-count-for-nothing",
        bug="the frequency filter never sees a hit",
        file="kvbm/tiers/disk/tier.py",
        old="self._admit(self._filter.hit(hashes))",
        new="self._filter.hit(())",
        fails="tests/leader",
    ),
    Mutant(
        name="disk-side-is-on-before-it-knows",
        bug="blocks are written to slots that hold what the next process has found and the leader has not yet read",
        file="kvbm/tiers/disk/tier.py",
        old="return self._is_filled and self.disk.is_on",
        new="return self.disk.is_on",
        fails="tests/leader/test_disk_tier.py -k little_per_step",
    ),
    Mutant(
        name="disk-side-keeps-what-a-lost-process-had",
        bug="what was on disk before its process ended is believed to be there still",
        file="kvbm/tiers/disk/tier.py",
        old="""\
            self.store.reset()
""",
        new="",
        fails="tests/leader/test_disk_tier.py",
    ),
    Mutant(
        name="disk-side-registers-failed-writes",
        bug="a block that failed to be written is thought to be on disk",
        file="kvbm/tiers/disk/tier.py",
        old="""\
        self._departing.difference_update(hashes)
""",
        new="""\
        self._departing.difference_update(hashes)
        is_good = [True] * len(is_good)
""",
        fails="tests/leader",
    ),
    Mutant(
        name="disk-side-takes-what-failed",
        bug="blocks whose read from disk failed are registered in host memory",
        file="kvbm/tiers/open_reads.py",
        old="""\
        self._host.prove(fetch.target, is_good)
""",
        new="""\
        is_good = [True] * len(is_good)
        self._host.prove(fetch.target, is_good)
""",
        fails="tests/leader",
    ),
    Mutant(
        name="disk-serves-before-a-clear-is-durable",
        bug="The disk counts as on between a clear and its answer.",
        file="kvbm/tiers/disk/service/client.py",
        old="return super().is_on and not self._unanswered_clears",
        new="return super().is_on",
        fails="tests/disk/test_client.py -k in_flight_and_what",
    ),
    Mutant(
        name="disk-that-does-not-answer-is-on",
        bug="A disk process that is stopped is sent more and more.",
        file="kvbm/child/service.py",
        old="not (self._has_exited or self.is_silent)",
        new="not self._has_exited",
        fails="tests/disk/test_client.py -k off_until_it_does --timeout 70",
    ),
    Mutant(
        name="disk-that-does-not-answer-is-waited-for",
        bug="A clear waits for a process that is known not to answer.",
        file="kvbm/tiers/disk/service/client.py",
        old="while self._uncleared is not None and not self.process.is_silent and time.monotonic() < deadline_s:",
        new="while self._uncleared is not None and time.monotonic() < deadline_s:",
        fails="tests/disk/test_supervisor.py -k does_not_wait_for_a_process",
    ),
    Mutant(
        name="lasting-disk-does-not-repeat-a-clear",
        bug="A clear that was sent to a process that has ended is not repeated by the next one.",
        file="kvbm/tiers/disk/service/client.py",
        old="        self._is_clear_sent = False\n        self._clear_tenant = None\n        if (self._has_ended",
        new="        if (self._has_ended",
        fails="tests/disk/test_supervisor.py -k repeated_by_the_next",
    ),
    Mutant(
        name="lasting-disk-forgets-an-owed-clear",
        bug="A clear counts as durable as soon as it is sent.",
        file="kvbm/tiers/disk/service/client.py",
        old="""\
            self._is_clear_sent = True
            self.process.clear(self._clear_tenant, ends_persistence=self._has_ended_persistence)
""",
        new="""\
            self._uncleared = None
            self.process.clear()
""",
        fails="tests/disk/test_supervisor.py -k repeated_by_the_next",
    ),
    Mutant(
        name="lasting-disk-leaves-a-clear-undone",
        bug="An engine that ends leaves blocks that were cleared and whose process did not answer.",
        file="kvbm/tiers/disk/service/client.py",
        old="            _clear_closed(self._uncleared)",
        new="            pass",
        fails="tests/disk/test_supervisor.py -k when_the_engine_ends",
    ),
    Mutant(
        name="lasting-disk-persists-again",
        bug="after a change of the weights, the process that replaces a killed one persists blocks again",
        file="kvbm/tiers/disk/service/client.py",
        old="if (self._has_ended_persistence or self._clears_first) and self._uncleared is None:",
        new="if False:",
        fails="tests/disk/test_supervisor.py -k ends_persistence",
    ),
    Mutant(
        name="lasting-disk-leaves-the-next-one",
        bug="an engine that ends leaves the next disk process, which was just opened, to itself",
        file="kvbm/child/service.py",
        old="""\
                if self._next is not None:
                    self._next.close(timeout_s)
""",
        new="""\
                pass
""",
        fails="tests/disk/test_supervisor.py -k never_used",
    ),
    Mutant(
        name="lasting-disk-never-backs-off",
        bug="a process that ends at once is started again and again without a longer pause",
        file="kvbm/child/service.py",
        old="return min(2 * pause_s, deadlines.LONGEST_PAUSE_S)",
        new="return pause_s",
        fails="tests/disk/test_supervisor.py -k pauses",
    ),
    Mutant(
        name="disk-side-counts-drops-without-room",
        bug="A read that waits for room counts blocks as dropped that stay in host memory.",
        file="kvbm/tiers/host_tier.py",
        old="        if count > self.store.available:\n            return None\n",
        new="        if count > self.capacity_blocks:\n            return None\n",
        fails="tests/leader/test_disk_tier.py -k waits_for_room_drops",
    ),
    Mutant(
        name="disk-side-fetches-lost-blocks",
        bug="A load whose blocks another read has lost is fetched all the same.",
        file="kvbm/tiers/disk/tier.py",
        old="return self.is_on and bool(self.store.missing(hashes))",
        new="return False",
        fails="tests/leader/test_disk_tier.py -k lost_to_an_abandoned",
    ),
    Mutant(
        name="disk-side-reports-what-it-has-sent",
        bug="the last line of an engine counts blocks that the disk has not confirmed",
        file="kvbm/tiers/disk/tier.py",
        old="        done = self._counters.disk.offload_blocks - before\n",
        new="        done = due\n",
        fails="tests/leader/test_disk_tier.py -k confirmed",
    ),
    Mutant(
        name="disk-side-drains-into-a-disk-that-hangs",
        bug="a stop waits for a disk that confirms nothing until its time to drain is over",
        file="kvbm/tiers/disk/tier.py",
        old="while self.is_writing() and self._clock() < deadline_s and self._clock() - moved_s < DRAIN_HUNG_S:",
        new="while self.is_writing() and self._clock() < deadline_s:",
        fails="tests/leader/test_disk_tier.py -k confirmed",
    ),
    Mutant(
        name="disk-side-drains-more-than-the-disk-holds",
        bug="at the end, old blocks of host memory evict the newest ones from a smaller disk",
        file="kvbm/tiers/disk/tier.py",
        old="newest_first[: self.disk.slot_count]",
        new="newest_first",
        fails="tests/leader/test_disk_tier.py -k at_the_end",
    ),
    Mutant(
        name="disk-side-drains-without-touching-what-stays",
        bug="at the end, blocks of host memory evict newer ones that are on disk already",
        file="kvbm/tiers/disk/tier.py",
        old="        self.store.touch(fitting)\n",
        new="",
        fails="tests/leader/test_disk_tier.py -k at_the_end",
    ),
    Mutant(
        name="rates-are-written-again-although-equal",
        bug="rates that have hardly changed are written every 10 s",
        file="kvbm/tiers/disk/tier.py",
        old="if self._kept_rates is None or known.differ(self._kept_rates):",
        new="if known:",
        fails="tests/leader/test_disk_tier.py -k keeps_rates",
    ),
)
