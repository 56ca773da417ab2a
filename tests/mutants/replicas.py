"""Bugs in the one copy of ranks with equal KV."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="replicas-samples-are-not-compared",
        bug="ranks whose KV differs serve the bytes of one of them",
        file="kvbm/host/region.py",
        old="self.are_different = bool((checksums != checksums[0]).any())",
        new="self.are_different = False",
        fails="tests/leader/test_equal_ranks.py",
    ),
    Mutant(
        name="replicas-one-report-is-enough",
        bug="an offload ends while other ranks still copy their share",
        file="kvbm/host/region.py",
        old="        has_ended = is_final(found, wanted) | self._lost(is_lost)\n"
        "        ended: list[bool] = np.logical_and.reduce(has_ended).tolist()",
        new="        has_ended = is_final(found, wanted) | self._lost(is_lost)\n"
        "        ended: list[bool] = np.logical_or.reduce(has_ended).tolist()",
        fails="tests/device/test_common_segment.py",
    ),
    Mutant(
        name="replicas-failed-report-counts-as-an-end-only",
        bug="the shares of the other ranks are registered although one sample is missing",
        file="kvbm/host/region.py",
        old="        if not (found == control_word(generation, SlotState.READY)).all() or",
        new="        if not (found == control_word(generation, SlotState.READY)).any() or",
        fails="tests/device/test_common_segment.py tests/leader/test_equal_ranks.py",
    ),
    Mutant(
        name="replicas-leave-out-a-share",
        bug="blocks that do not divide by the number of ranks are copied by none",
        file="kvbm/device/worker.py",
        old="return range(turn * count // info.replica_count, (turn + 1) * count // info.replica_count)",
        new="return range(turn * (count // info.replica_count), (turn + 1) * (count // info.replica_count))",
        fails="tests/leader/test_equal_ranks.py",
    ),
    Mutant(
        name="replicas-samples-overwrite-each-other",
        bug="two copying threads of a rank use its sample slot at the same time, and the cache is turned off",
        file="kvbm/device/worker.py",
        old="        with self._sampling:\n",
        new="        if self._sampling:\n",
        fails="tests/leader/test_equal_ranks.py",
    ),
    Mutant(
        name="replicas-free-memory-of-the-owner",
        bug="a rank that ends first empties the host memory of the others",
        file="kvbm/host/shared_memory.py",
        old="        if self._is_owner:\n",
        new="        if self.fd:\n",
        fails="tests/device/test_common_segment.py",
    ),
    Mutant(
        name="replicas-are-not-in-the-identity",
        bug="blocks on disk that were written with another number of copies are read",
        file="kvbm/engines/opening.py",
        old="info.layout_digest] for info in segments if info.replica == 0]",
        new="info.layout_digest] for info in segments]",
        fails="tests/leader/test_equal_ranks.py",
    ),
    Mutant(
        name="replicas-count-in-the-sizes",
        bug="`kvbm size` counts the copy of ranks with equal KV once per rank",
        file="kvbm/sizing/tiers.py",
        old="device.rank_block_bytes[:: device.replica_count]",
        new="device.rank_block_bytes",
        fails="tests/sizing/test_sizing_vllm.py",
    ),
    Mutant(
        name="replicas-different-kv-leaves-the-disk",
        bug="after ranks with one copy reported different bytes, the next start reads their blocks from disk",
        file="kvbm/leader/leader.py",
        old="            self.reset(ends_persistence=True)\n            reason",
        new="            self._forget_all()\n            reason",
        fails="tests/leader/test_equal_ranks.py",
    ),
)
