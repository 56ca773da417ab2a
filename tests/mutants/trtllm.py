"""Bugs in the connector for TensorRT-LLM."""

from __future__ import annotations

from mutant import Mutant

LEADER_SIDE = "kvbm/trtllm_integration/leader_side.py"
RANK_SIDE = "kvbm/trtllm_integration/rank_side.py"

MUTANTS = (
    Mutant(
        name="trtllm-options-open-to-all",
        bug="every user of the machine can read the file of options",
        file="kvbm_cli/engine/process.py",
        old='with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:',
        new='with open(path, "w") as file:',
        fails="tests/cli/test_serve_trtllm.py -k serve_starts_it",
    ),
    Mutant(
        name="trtllm-baseline-with-the-connector",
        bug="the baseline has the cache too",
        file="kvbm/trtllm_integration/launch.py",
        old='return {**found, "kv_connector_config": dict(CONNECTOR)} if connector else found',
        new='return {**found, "kv_connector_config": dict(CONNECTOR)}',
        fails="tests/config/test_launch_trtllm.py",
    ),
    Mutant(
        name="trtllm-option-of-the-profile-replaces-a-section",
        bug="a profile with options of the KV cache loses those that kvbm requires",
        file="kvbm/trtllm_integration/launch.py",
        old="required = {name: {**section, **(given.get(name) or {})} for name, section in _REQUIRED.items()}",
        new="required = {name: given.get(name) or section for name, section in _REQUIRED.items()}",
        fails="tests/config/test_launch_trtllm.py",
    ),
    Mutant(
        name="trtllm-true-passes-for-one",
        bug="`max_beam_width: true` is accepted, because True equals 1",
        file="kvbm/config/trtllm_options.py",
        old="return value == self.required and isinstance(value, bool) == isinstance(self.required, bool)",
        new="return value == self.required",
        fails="tests/config/test_trtllm_options.py",
    ),
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
        old="for name in _MEDIA) and not _is_given(digests):",
        new="for name in _MEDIA) and digests == []:",
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
