"""Bugs in the connector for TensorRT-LLM."""

from __future__ import annotations

from mutant import Mutant

LEADER_SIDE = "kvbm/trtllm_integration/leader_side.py"
RANK_SIDE = "kvbm/trtllm_integration/rank_side.py"

MUTANTS = (
    Mutant(
        name="trtllm-offers-the-last-token",
        bug="a hit may cover the whole prompt, so that no token is left to compute",
        file=LEADER_SIDE,
        old="loadable = tracked.hashes[: (len(tracked.tokens) - 1) // self._size]",
        new="loadable = tracked.hashes",
        fails="tests/trtllm/test_traps.py -k trap_4",
    ),
    Mutant(
        name="trtllm-offers-behind-part-of-a-block",
        bug="a load starts in the middle of a block that the engine has in part",
        file=LEADER_SIDE,
        old="if tracked.key is None or device_tokens % self._size:",
        new="if tracked.key is None:",
        fails="tests/trtllm/test_traps.py -k trap_4",
    ),
    Mutant(
        name="trtllm-loads-into-the-first-blocks",
        bug="a load goes to the first blocks of the request, not to those behind its local hit",
        file=LEADER_SIDE,
        old="begin, end = tracked.start, tracked.start + tracked.matched",
        new="begin, end = 0, tracked.matched",
        fails="tests/trtllm/test_traps.py -k trap_1",
    ),
    Mutant(
        name="trtllm-copies-from-block-minus-one",
        bug="a missing block is read as the last one of the pool",
        file=LEADER_SIDE,
        old="return [block_id if block_id >= 0 else NO_BLOCK for block_id in groups[0]]",
        new="return [block_id % 24 for block_id in groups[0]]",
        fails="tests/trtllm/test_traps.py -k trap_8",
    ),
    Mutant(
        name="trtllm-key-without-adapter",
        bug="requests of two adapters share blocks",
        file="kvbm/trtllm_integration/request_key.py",
        old='"adapter": None if adapter is _MISSING else adapter,',
        new='"adapter": None,',
        fails="tests/trtllm/test_traps.py -k trap_9",
    ),
    Mutant(
        name="trtllm-caches-media-without-digests",
        bug="two images that the engine does not name share blocks",
        file="kvbm/trtllm_integration/request_key.py",
        old="if _has_media(request) and not (_is_given(digests) and all(map(_is_given, digests))):",
        new="if _has_media(request) and digests == []:",
        fails="tests/trtllm/test_traps.py -k trap_9",
    ),
    Mutant(
        name="trtllm-serves-engines-whose-weights-change",
        bug="blocks of the former weights are used after an update of the weights in memory",
        file="kvbm/trtllm_integration/engine_facts.py",
        old='_WEIGHT_UPDATES = ("ray_worker_extension_cls", "sleep_config")',
        new='_WEIGHT_UPDATES = ("sleep_config",)',
        fails="tests/trtllm/test_traps.py -k not_supported",
    ),
    Mutant(
        name="trtllm-overlooks-media-of-the-pytorch-backend",
        bug="two images that TensorRT-LLM could not hash share blocks",
        file="kvbm/trtllm_integration/request_key.py",
        old=" or not data.keys() <= {_FROM_TOKENS}",
        new="",
        fails="tests/trtllm/test_traps.py -k trap_9",
    ),
    Mutant(
        name="trtllm-releases-blocks-under-a-copy",
        bug="the engine reuses blocks of an ended request while they are copied",
        file=LEADER_SIDE,
        old="return any(self._held[",
        new="return False and any(self._held[",
        fails="tests/trtllm/test_tokens.py",
    ),
    Mutant(
        name="trtllm-registers-copies-of-a-paused-request",
        bug="a copy is registered although its source was overwritten",
        file=LEADER_SIDE,
        old="self.leader.discard_offloads([block_id for block_id in tracked.block_ids if block_id != NO_BLOCK])",
        new="pass",
        fails="tests/trtllm/test_traps.py -k trap_12",
    ),
    Mutant(
        name="trtllm-copies-what-was-not-computed",
        bug="offloads of a step without a forward pass run at the end of the iteration",
        file=RANK_SIDE,
        old="worker.start(StepPlan(plan.step, overdue_offloads=plan.offloads))",
        new="worker.finish(StepPlan(plan.step, offloads=plan.offloads))",
        fails="tests/trtllm/test_traps.py -k without_a_forward_pass",
    ),
    Mutant(
        name="trtllm-reports-a-load-too-early",
        bug="a request is reported as loaded before its blocks are there",
        file=RANK_SIDE,
        old="worker.has_onboarded(order) for worker, order in zip(self._workers, orders, strict=False)",
        new="order for worker, order in zip(self._workers, orders, strict=False)",
        fails="tests/trtllm/test_tokens.py",
    ),
    Mutant(
        name="trtllm-gives-up-a-failed-load",
        bug="a failed copy of a promised block is not repeated",
        file=RANK_SIDE,
        old="repeats_onboards=True,",
        new="repeats_onboards=False,",
        fails="tests/trtllm/test_tokens.py -k fail --timeout 20",
    ),
    Mutant(
        name="trtllm-promises-without-a-pin",
        bug="a promised block may be evicted before it is loaded",
        file="kvbm/leader/leader.py",
        old="        if not self._settings.engine.accepts_failed_loads:\n            self._promise",
        new="        if False:\n            self._promise",
        fails="tests/trtllm/test_traps.py -k trap_5",
    ),
)
