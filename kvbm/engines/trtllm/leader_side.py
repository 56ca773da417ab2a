"""Leader's side of the connector: translates TensorRT-LLM's scheduler hooks into calls of the leader. Rank 0 only.

All hooks run in the event-loop thread of the executor. The leader is created when every rank has registered its KV
cache; until then no block is found and none is saved.

TensorRT-LLM accepts no failed load. So a promise of `match` is kept: the blocks are in host memory and pinned, and each
rank repeats a copy until it succeeds. Loads are asynchronous: the request is parked until every rank has its blocks.
Blocks on disk are not promised. The leader reads them into host memory, where a later lookup finds them.

    match            remembers where the load starts. The position in a later report is not used for this: its meaning
                     differs between synchronous and asynchronous loads
    allocated        orders the load. The parked request is in no report until it has been loaded
    build_orders     reads the reports, orders offloads, and returns the orders of the step
    settle           at the end of the step, called by the worker of rank 0
    end_request      returns True while a copy uses blocks of the request. The engine keeps them until all ranks report
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbm.boundary import Boundary, hook
from kvbm.engines.launch_plan import CONTROL_VARIABLE
from kvbm.engines.opening import EngineAtStart, open_leader
from kvbm.engines.trtllm.identity import identity
from kvbm.engines.trtllm.messages import NOTHING, TransferOrders
from kvbm.engines.trtllm.request_key import RequestKey, request_key
from kvbm.engines.trtllm.retention import hint_of
from kvbm.errors import EnvironmentProblem
from kvbm.hashing import HASH_BYTES, extend, namespace, root, tenant
from kvbm.identity.description import Description, describe
from kvbm.leader.offloads import NO_BLOCK
from kvbm.observe.telemetry import Telemetry
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks

if TYPE_CHECKING:
    from kvbm.config.schema import ConnectorConfig
    from kvbm.engines.trtllm.engine_facts import EngineFacts
    from kvbm.engines.trtllm.messages import RankReport
    from kvbm.leader.guarded import GuardedLeader
    from kvbm.plan import StepPlan

BlockIds = Sequence[int] | Sequence[Sequence[int]] | dict[int, Sequence[int]]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TrackedRequest:
    """A request that the engine has looked up. `key` is None if it bypasses the cache.

    `tokens` are the known tokens, `hashes` name their full blocks. `block_ids` are the ids in the first layer group,
    NO_BLOCK if a group has no block there. The promise of the last match is `start` and `matched`,
    in blocks. A request `is_reported` once the engine has scheduled it. If it starts again after that, reports of what
    was added no longer tell which tokens are in which block: it is not saved until it is reported as new.
    """

    request_id: int
    key: RequestKey | None
    tokens: list[int]
    prompt_tokens: int
    hashes: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    hint: object = None
    start: int = 0
    matched: int = 0
    is_reported: bool = False
    may_save: bool = True
    loaded_tokens: int = 0
    due_blocks: int = 0


class LeaderSide:
    """See the module's text. `arguments` are TensorRT-LLM's. `has_salts`: its version has cache salts."""

    def __init__(self, config: ConnectorConfig, arguments: Any, facts: EngineFacts, *, has_salts: bool) -> None:
        self._config = config
        self._arguments = arguments
        self._facts = facts
        self._size = facts.block_tokens
        self._namespace = namespace({"engine": "tensorrt-llm"})  # host memory belongs to one engine
        self._has_salts = has_salts
        self._telemetry = Telemetry(config.metrics, control_directory=os.environ.get(CONTROL_VARIABLE))
        self._requests: dict[int, TrackedRequest] = {}
        self._held: Counter[int] = Counter()  # G1 blocks that a copy uses, by the first group's id
        self._tables: dict[int, tuple[int, ...]] = {}  # block ids of all groups, by the first group's id
        self._empty_loads: list[int] = []  # requests whose load has no blocks, since the last step
        self._loading: dict[tuple[int, ...], int] = {}  # block ids of a load -> request id
        self._ordered: set[tuple[int, ...]] = set()  # block ids of loads whose order the ranks have
        self._group_count = 1
        self._is_closed = False
        self.boundary = Boundary()
        self.leader: GuardedLeader | None = None

    def connect(self, reports: Sequence[RankReport]) -> None:
        """Create the leader. Raises EnvironmentProblem unless all ranks are alike and on this machine."""
        for name in ("config_digest", "boot_id", "block_count"):
            values = sorted({str(getattr(report, name)) for report in reports})
            if len(values) > 1:
                raise EnvironmentProblem(
                    f"the ranks have different values of `{name}`: {', '.join(values)}",
                    hint="put the configuration into `TLLM_KVBM_CONFIG`, which reaches every rank",
                )
        self._group_count = len(reports[0].segments)
        segments = [segment for report in reports for segment in report.segments]
        traits = EngineTraits(self._size, hash_bytes=HASH_BYTES, accepts_failed_loads=False)
        self.leader = open_leader(
            self.boundary,
            self._config,
            EngineAtStart(
                segments, traits, reports[0].block_count, self._described, info={"engine_name": "tensorrt-llm"}
            ),
            LeaderCallbacks(
                self._held.update,
                self._held.subtract,
                self._tenant_of,
                self._telemetry.trace,
                spans=self._telemetry.spans(lambda request_id: None),
                ended=self._telemetry.ended,
                hint_of=self._hint_of,
            ),
        )
        self._telemetry.watch(self.leader)
        log.info("kvbm: %d blocks in host memory over %d ranks", self.leader.region.slot_count, len(reports))

    def _hint_of(self, request_id: str) -> tuple[object, object]:
        tracked = self._requests.get(int(request_id))
        return None if tracked is None else tracked.hint, None

    def _described(self) -> Future[Description]:
        """Return what decides the bytes and hashes of a block, and why that may be in doubt."""
        facts, doubt = identity(self._arguments)
        layout = {"groups": self._group_count, "ranks": self._facts.rank_count, "block_tokens": self._size}
        return describe({**facts, **layout, "root": root(self._namespace).hex()}, doubt)

    @hook(0)
    def match(self, request: Any, device_tokens: int) -> int:
        """Return how many tokens after the first `device_tokens` a load brings. Runs under a lock of the engine."""
        if self.leader is None or getattr(request, "is_dummy_request", False):
            return 0
        tracked = self._track(request)
        tracked.start, tracked.matched = device_tokens // self._size, 0
        if tracked.key is None or device_tokens % self._size:
            return 0
        loadable = tracked.hashes[: (len(tracked.tokens) - 1) // self._size]
        if tracked.start >= len(loadable):
            return 0
        tracked.matched = self.leader.match(str(tracked.request_id), loadable, tracked.start) or 0
        return tracked.matched * self._size

    @hook(when_off=True)
    def allocated(self, request: Any, block_ids: BlockIds) -> None:
        """Order the load that was promised. `block_ids` are all blocks of the prompt, per layer group."""
        request_id, groups = int(request.request_id), _by_group(block_ids)
        tracked = self._requests.get(request_id)
        if self.leader is None or tracked is None:
            return
        tracked.block_ids = self._joined(groups)
        begin, end = tracked.start, tracked.start + tracked.matched
        tracked.matched = 0
        if end == begin:
            return
        wanted = [i for i in range(begin, min(end, len(tracked.block_ids))) if tracked.block_ids[i] != NO_BLOCK]
        targets = tuple(tracked.block_ids[i] for i in wanted)
        if not targets:
            self._empty_loads.append(request_id)
            return
        self._loading[targets] = request_id
        hashes = [tracked.hashes[i] for i in wanted]
        tracked.loaded_tokens = (end - begin) * self._size
        self.leader.onboard(str(request_id), hashes, 0, targets, tokens=(end - begin) * self._size)

    @hook()
    def cancel_load(self, request: Any, start_token: int) -> None:
        """Load nothing from this token on. A load that was ordered already continues; its blocks stay held."""
        tracked = self._requests.get(int(request.request_id))
        if tracked is not None:
            tracked.matched = max(0, min(tracked.matched, start_token // self._size - tracked.start))

    @hook(when_off=True)
    def restart(self, request: Any) -> None:
        """Forget the blocks of this request: the engine computes it again, in other blocks."""
        tracked = self._requests.get(int(request.request_id))
        if self.leader is not None and tracked is not None:
            self._forget_progress(tracked)

    @hook(False, when_off=True)
    def end_request(self, request: Any, block_ids: BlockIds) -> bool:
        """Return whether a copy uses blocks of this request: the engine must keep them."""
        tracked = self._requests.pop(int(request.request_id), None)
        if self.leader is None or tracked is None:
            return False
        disk, shared = self.leader.lower_tier_tokens(str(tracked.request_id))
        self.leader.counters.count_prompt(
            tracked.prompt_tokens,
            device=tracked.start * self._size,
            external=tracked.loaded_tokens,
            disk=disk,
            shared=shared,
        )
        self.leader.finish(str(tracked.request_id), tracked.hashes)
        return any(self._held[block_id] for block_id in (*tracked.block_ids, *self._joined(_by_group(block_ids))))

    @hook(NOTHING, when_off=True)
    def build_orders(self, output: Any) -> TransferOrders:
        if self.leader is None:
            return NOTHING
        self._offload_all(output)
        return self._addressed(self.leader.step())

    @hook()
    def _offload_all(self, output: Any) -> None:
        for data in output.new_requests:
            self._read_report(data, is_first=True)
        for data in output.cached_requests:
            self._read_report(data, is_first=False)

    @hook(when_off=True)
    def settle(self) -> None:
        """Register what has arrived in host memory. Ranks report ended loads to the engine themselves."""
        if self.leader is None:
            return
        for result in self.leader.settle():
            self._loading.pop(result.block_ids, None)
            is_ordered = result.block_ids in self._ordered
            self._ordered.discard(result.block_ids)
            if not is_ordered and result.is_live:
                log.error("kvbm: request %s waits for a load that cannot be done; cancel it", result.request_id)

    def close(self) -> None:
        """Write to disk what the time allows, and close the reports and the mapping of the ranks' memory. May be called
        twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.leader is not None:
            self.leader.close()
        self.boundary.attempt("close", self._telemetry.close)

    def _track(self, request: Any) -> TrackedRequest:
        """Return the state of a request at its lookup. A second lookup continues it, unless it starts again."""
        request_id, tokens = int(request.request_id), list(request.get_tokens(0))
        tracked = self._requests.get(request_id)
        if tracked is None:
            key = request_key(request, has_adapters=self._facts.has_adapters, has_salts=self._has_salts)
            tracked = self._requests[request_id] = TrackedRequest(request_id, key, tokens, len(tokens))
            tracked.hint = hint_of(request)
        else:
            if tracked.is_reported:
                self._forget_progress(tracked)
            tracked.tokens = tokens
        self._extend(tracked)
        return tracked

    def _extend(self, tracked: TrackedRequest) -> None:
        """Hash the new full blocks. A request with a token id that has no hash, as a negative one, bypasses the cache
        from here on."""
        if tracked.key is None:
            return
        start = root(self._namespace, salt=tracked.key.salt)
        try:
            extend(tracked.hashes, tracked.tokens, block_size=self._size, root=start)
        except OverflowError:
            tracked.key = None

    def _forget_progress(self, tracked: TrackedRequest) -> None:
        """Save nothing more of this request, nor what is on its way: its blocks may be overwritten during the copy."""
        assert self.leader is not None
        self.leader.discard_offloads([block_id for block_id in tracked.block_ids if block_id != NO_BLOCK])
        self.leader.finish(str(tracked.request_id), tracked.hashes)
        tracked.block_ids, tracked.may_save, tracked.due_blocks = [], False, 0

    def _read_report(self, data: Any, *, is_first: bool) -> None:
        """Note what a report adds to a request, and offload the blocks that the step completes.

        `computed_position` and `num_scheduled_tokens` give a lower bound of what is computed after the step. Versions
        without the second one report only what was computed before.
        """
        tracked = self._requests.get(data.request_id)
        if tracked is None:
            return
        by_group = getattr(data, "new_block_ids_by_layer_group", None)  # older versions have only the flat form
        block_ids = self._joined(_by_group(by_group or data.new_block_ids))
        if is_first:
            tracked.tokens, tracked.block_ids = list(data.new_tokens), block_ids
            tracked.may_save = True
            tracked.priorities = None
        else:
            tracked.tokens += data.new_tokens
            tracked.block_ids += block_ids
        tracked.is_reported = True
        self._note_priorities(tracked, data, len(block_ids))
        if tracked.key is None or not tracked.may_save or self._has_other_salt(tracked, data):
            return
        self._extend(tracked)
        if tracked.key is None:
            return
        computed = data.computed_position + getattr(data, "num_scheduled_tokens", 0)
        blocks = min(computed, len(tracked.tokens)) // self._size
        if blocks > tracked.due_blocks:
            assert self.leader is not None
            tracked.due_blocks = self.leader.offload(
                str(tracked.request_id),
                tracked.hashes,
                tracked.block_ids,
                computed_blocks=blocks,
                prompt_blocks=tracked.prompt_tokens // self._size,
                priorities=tracked.priorities if self._config.offload.min_priority else None,
            )

    def _note_priorities(self, tracked: TrackedRequest, data: Any, count: int) -> None:
        """Only requests with a retention configuration have priorities, and not in every version."""
        given = getattr(data, "priorities", None)
        if given is not None:
            known = tracked.priorities or [0] * (len(tracked.block_ids) - count)
            tracked.priorities = [*known, *given]

    def _has_other_salt(self, tracked: TrackedRequest, data: Any) -> bool:
        """Whether the engine reports a salt that the request did not have at its lookup."""
        salt = getattr(data, "cache_salt", None)
        if salt is not None and tracked.key is not None and tracked.key.tenant is None:
            tracked.may_save = False
        return not tracked.may_save

    def _addressed(self, plan: StepPlan) -> TransferOrders:
        """Add to the plan the requests that wait for its loads, and the block ids of all layer groups."""
        onboards = (*plan.onboards, *plan.overdue_onboards)
        loads: list[tuple[int, int | None]] = [
            (self._loading[order.block_ids], order.generation) for order in onboards if order.block_ids in self._loading
        ]
        self._ordered.update(order.block_ids for order in onboards)
        loads += [(request_id, None) for request_id in self._empty_loads]
        self._empty_loads.clear()
        tables: dict[int, tuple[int, ...]] = {}
        if self._group_count > 1:
            copied = [order.block_ids for order in onboards] + [order.block_ids for order in plan.offloads]
            tables = {block_id: self._tables[block_id] for block_ids in copied for block_id in block_ids}
        return TransferOrders(plan, tuple(loads), tables)

    def _joined(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Return the block ids in the first group, and remember the ids in the others. A block that is missing in one
        group counts as missing: all layers of a block move together."""
        if len(groups) == 1:
            return [block_id if block_id >= 0 else NO_BLOCK for block_id in groups[0]]
        rows = [tuple(row) for row in zip(*groups, strict=False)]
        self._tables.update((row[0], row) for row in rows if min(row) >= 0)
        return [row[0] if min(row) >= 0 else NO_BLOCK for row in rows]

    def _tenant_of(self, request_id: str) -> bytes:
        tracked = self._requests.get(int(request_id))
        return b"" if tracked is None or tracked.key is None else tenant(tracked.key.tenant)


def _by_group(block_ids: BlockIds) -> Sequence[Sequence[int]]:
    """Return block ids per layer group. Engines pass a list or a dict by group, or the ids of the only group."""
    if isinstance(block_ids, dict):
        return [block_ids[group] for group in sorted(block_ids)]
    is_flat = not block_ids or isinstance(block_ids[0], int)
    return [block_ids] if is_flat else block_ids  # type: ignore[list-item,return-value]
