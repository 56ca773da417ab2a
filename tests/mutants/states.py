"""Bugs in the cache of models with states: which snapshot serves a hit, what is copied, and what is evicted."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="states-older-snapshot-for-a-deeper-hit",
        bug="a hit ends behind the snapshot that it loads",
        file="kvbm/core/groups.py",
        old="return next((end * group.block_tokens for end in ends if is_present(chain[end - 1])), start)",
        new="return reach if any(is_present(chain[end - 1]) for end in ends) else start",
        fails="tests/core/test_groups.py",
    ),
    Mutant(
        name="states-snapshot-of-the-block-behind",
        bug="a hit takes the state of the block behind its end",
        file="kvbm/core/groups.py",
        old="""\
        return end // self.block_tokens - 1
""",
        new="""\
        return end // self.block_tokens
""",
        fails="tests/core/test_groups.py",
    ),
    Mutant(
        name="states-snapshot-newer-than-its-chain",
        bug="a snapshot is evicted after the blocks that it serves",
        file="kvbm/core/groups.py",
        old="found.append(((block + 1) * group.block_tokens, is_state, chain[block]))",
        new="found.append((block * group.block_tokens * (not is_state), is_state, chain[block]))",
        fails="tests/leader/test_states.py",
    ),
    Mutant(
        name="states-snapshot-in-parts",
        bug="a part of a snapshot is copied when there is no room for the rest",
        file="kvbm/leader/offloads.py",
        old="""\
        if len(absent) > self._room(SNAPSHOT_SHARE * self._settings.max_in_flight_blocks, unwritten):
            self._counters\
""",
        new="""\
        absent = absent[: self._room(SNAPSHOT_SHARE * self._settings.max_in_flight_blocks, unwritten)]
        if not absent:
            self._counters\
""",
        fails="tests/leader/test_states.py",
    ),
    Mutant(
        name="states-snapshot-copied-again",
        bug="a snapshot that is in host memory is copied again",
        file="kvbm/leader/offloads.py",
        old="""\
        absent = [index for index in self._host.store.touch(hashes) if hashes[index] not in self._departing]
""",
        new="""\
        absent = [index for index, name in enumerate(hashes) if name not in self._departing]
""",
        fails="tests/leader/test_states.py",
    ),
    Mutant(
        name="states-snapshot-registered-last",
        bug="a snapshot that arrives with its chain is evicted after the chain",
        file="kvbm/leader/offloads.py",
        old="batch, snapshots = self._collected, self._snapshots",
        new="snapshots, batch = self._collected, self._snapshots",
        fails="tests/leader/test_states.py",
    ),
    Mutant(
        name="states-blocks-not-held",
        bug="the engine may overwrite a snapshot under its copy",
        file="kvbm/leader/offloads.py",
        old="""\
        self._block_pool.hold(block_ids)
""",
        new="""\
        if not is_snapshot:
            self._block_pool.hold(block_ids)
""",
        fails="tests/leader/test_states.py tests/leader/test_leader_machine.py -k states",
    ),
    Mutant(
        name="states-offloaded-after-a-reset",
        bug="the snapshot of a request that lives through a reset is offloaded",
        file="kvbm/leader/leader.py",
        old="""\
        if not request.may_offload or self.counters.disabled:
            return False
        if self._trace\
""",
        new="""\
        if self.counters.disabled:
            return False
        if self._trace\
""",
        fails="tests/leader/test_states.py",
    ),
    Mutant(
        name="states-reset-does-not-notice",
        bug="a reset does not notice that a request has only offloaded a snapshot",
        file="kvbm/leader/leader.py",
        old="""\
        request = self._live(request_id)
        request.has_blocks = True
        if not request.may_offload or\
""",
        new="""\
        request = self._live(request_id)
        if not request.may_offload or\
""",
        fails="tests/leader/test_states.py",
    ),
    Mutant(
        name="states-lost-tokens-counted-per-lookup",
        bug="each lookup of one request counts lost tokens",
        file="kvbm/leader/matching.py",
        old="""\
            request.lost_state_tokens = max(0, reach // self._unit * self._unit - hit)
""",
        new="""\
            request.lost_state_tokens = max(0, reach // self._unit * self._unit - hit)
            self._counters.lost_state_tokens += request.lost_state_tokens
""",
        fails="tests/leader/test_states.py",
    ),
    Mutant(
        name="states-lost-tokens-of-a-part-of-a-block",
        bug="tokens behind the last common end of blocks count as lost",
        file="kvbm/leader/matching.py",
        old="max(0, reach // self._unit * self._unit - hit)",
        new="max(0, reach - hit)",
        fails="tests/leader/test_states.py",
    ),
    Mutant(
        name="states-lost-tokens-after-a-failed-load",
        bug="a retry after a failed load asks for a snapshot at a wrong position",
        file="kvbm/leader/matching.py",
        old="        request.lost_state_tokens = 0  # a retry",
        new="        self._live(request_id)  # a retry",
        fails="tests/leader/test_states.py",
    ),
    Mutant(
        name="states-older-snapshots-stay",
        bug="the end of a request makes every block of its chains recent",
        file="kvbm/core/groups.py",
        old="SNAPSHOTS_PER_CHAIN = 2 ",
        new="SNAPSHOTS_PER_CHAIN = 99 ",
        fails="tests/leader/test_states.py",
    ),
)
