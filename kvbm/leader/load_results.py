"""LoadResults: what the leader reports of loads that have ended, and what the end of a load means for its request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.leader.rates import Rates
    from kvbm.leader.request import LiveRequest, Load
    from kvbm.leader.settings import LeaderSettings
    from kvbm.metrics import Counters


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of one request's load: its G1 blocks may be read, except `failed_block_ids`.

    `is_live`: the request has neither ended nor been preempted since the load began.
    """

    request_id: str
    block_ids: tuple[int, ...]
    failed_block_ids: tuple[int, ...]
    is_live: bool


class LoadResults:
    """Those that `take` has not returned. `requests` are the live ones of the leader."""

    def __init__(
        self, settings: LeaderSettings, counters: Counters, rates: Rates, requests: Mapping[str, LiveRequest]
    ) -> None:
        self._settings = settings
        self._counters = counters
        self._rates = rates
        self._requests = requests
        self._untaken: list[LoadResult] = []

    def __bool__(self) -> bool:
        return bool(self._untaken)

    def take(self) -> list[LoadResult]:
        results, self._untaken = self._untaken, []
        return results

    def note(self, load: Load) -> None:
        """Note a load that has ended, whole, cut or failed. After a cut, the request computes the rest and loads no
        more."""
        if load.is_failed:
            self.fail(load.request, load.block_ids, is_below=load.is_failed_below)
            return
        request, left_out = load.request, load.block_ids[load.end :]
        block_tokens = self._settings.traits.block_tokens
        self._counters.onboard_blocks += load.end
        self._counters.onboard_failed_blocks += len(left_out)
        self._counters.onboard_bytes += load.end * self._settings.block_bytes
        request.hit_blocks += load.loaded_tokens // block_tokens
        request.lower_tokens = load.lower_tokens()
        for tier, tokens in request.lower_tokens.items():
            self._counters.add("onboard_{}_blocks", tier, load.count_of(tier, load.end))
            request.lower_hits[tier] = request.lower_hits.get(tier, 0) + tokens // block_tokens
        request.may_onboard &= not left_out
        if self._is_live(request):
            self._counters.matched_tokens += load.loaded_tokens
            if rate := self._rates.tokens_per_s:
                self._counters.saved_prefill_s += load.loaded_tokens / rate
        self._report(request, load.block_ids, left_out)

    def fail(self, request: LiveRequest, block_ids: tuple[int, ...], *, is_below: bool = False) -> None:
        """Note a load that failed. The request recomputes and gets no other load, so that it cannot loop; only if a
        lower tier failed, it may load from host memory once."""
        if self._is_live(request):
            self._counters.onboard_failed_blocks += len(block_ids)
        request.may_onboard &= is_below and request.may_read_lower
        request.may_read_lower = False
        request.lower_tokens = {}
        self._report(request, block_ids, block_ids)

    def _report(self, request: LiveRequest, block_ids: tuple[int, ...], failed: tuple[int, ...]) -> None:
        self._untaken.append(LoadResult(request.request_id, block_ids, failed, self._is_live(request)))

    def _is_live(self, request: LiveRequest) -> bool:
        return self._requests.get(request.request_id) is request
