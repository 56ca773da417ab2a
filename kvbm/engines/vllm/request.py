"""VllmRequest: what the scheduler side knows of a live request of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbm.engines.vllm.media import RequestMedia
from kvbm.text.outside import shown

if TYPE_CHECKING:
    from vllm.v1.request import Request

UNLIMITED = 1 << 62
HINT_ACTION = "kvbm"  # the `action_type` of a hint in vLLM's `kv_hints`
BYPASS = {"max_load_tokens": 0, "max_offload_tokens": 0}

log = logging.getLogger(__name__)


@dataclass(slots=True)
class VllmRequest:
    """Its block table per group as the workers have it, and the client's limits.

    `snapshot_tokens`: the last position at which vLLM has a snapshot of it, in a model with states. `start`: its tokens
    in G1 at its last lookup; `loaded`: those that kvbm loads after it.
    """

    request: Request
    max_load_tokens: int
    max_offload_tokens: int
    media: RequestMedia | None = None
    block_ids: list[list[int]] = field(default_factory=list)
    chains: list[list[bytes]] = field(default_factory=list)
    start: int = 0
    loaded: int = 0
    snapshot_tokens: int = 0
    described: list[int] = field(default_factory=list)  # blocks per group, if KV events are published

    @classmethod
    def of(cls, request: Request, media: RequestMedia | None) -> VllmRequest:
        params = request.kv_transfer_params  # a client can set it to anything through `vllm_xargs`
        limits = params if isinstance(params, dict) else {}
        if not is_named(request):
            limits = BYPASS
        return cls(request, _limit(limits, "max_load_tokens"), _limit(limits, "max_offload_tokens"), media)

    def named_tokens(self, limit: int) -> int:
        """Return how many of the first `limit` tokens can be kept or looked up."""
        return limit if self.media is None else min(limit, self.media.certain_tokens())


def hint_of(request: Request) -> tuple[object, object]:
    """Return the hint of the client for kvbm, and the session that vLLM knows; None for what the request has not.

    The hint is in `kv_transfer_params`, else in the first action of `kv_hints` that is for kvbm. The leader checks it.
    """
    params, session = request.kv_transfer_params, getattr(request, "session_id", None)
    if isinstance(params, dict) and "kvbm" in params:
        return params["kvbm"], session
    envelope = getattr(request, "kv_hints", None)
    actions = () if envelope is None else envelope.actions
    return next((one.payload for one in actions if one.action_type == HINT_ACTION), None), session


def prompt_hashes(
    token_ids: Sequence[int], salt: str | None, block_tokens: int, hash_algorithm: str
) -> Sequence[bytes] | None:
    """Return vLLM's block hashes of a prompt without media and adapter. None if this vLLM makes requests in another
    way."""
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hasher = get_request_block_hasher(block_tokens, get_hash_fn_by_name(hash_algorithm))
    try:
        request = Request(
            "kvbm", list(token_ids), SamplingParams(max_tokens=1), None, cache_salt=salt, block_hasher=hasher
        )
    except TypeError:  # its arguments differ between versions
        return None
    hashes: Sequence[bytes] = request.block_hashes
    return hashes


def is_named(request: Request) -> bool:
    """Return whether the block hashes of a request name its blocks. They do not in two cases:

    - A client can add tokens to a resumable request (streaming input). vLLM then replaces the last token, and its hash.
    - A prompt of tokens and embeddings: the hashes do not cover which positions are tokens.
    """
    return not request.resumable and request.prompt_is_token_ids is None


def _limit(limits: dict[str, Any], name: str) -> int:
    """Return a client's limit in tokens. An invalid value is ignored with a warning."""
    value = limits.get(name)
    if value is None:
        return UNLIMITED
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return min(value, UNLIMITED)
    log.warning("kvbm: `kv_transfer_params.%s` must be a number of tokens, not `%s`; ignoring it", name, shown(value))
    return UNLIMITED
