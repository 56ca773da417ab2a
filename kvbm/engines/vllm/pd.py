"""PdConnector: host and disk cache together with the transfer between engines, for disaggregated prefill.

An engine that only prefills uses the KV cache of a prompt twice: it keeps the blocks for the next prompt with the same
prefix, and it sends them to the engine that decodes. PdConnector is a MultiConnector of vLLM with exactly two children,
DynamoConnector and then NixlConnector. Loads come from the first child that has tokens; both see every save.

PdConnector corrects three problems of MultiConnector:

- It rebuilds the statistics of its children by their registered names, in the API server. An unregistered child, known
  only by its module path, ends that process's output loop. `connector.py` registers ours.
- It uses the first child's handshake for all children. Both of ours have one, and each receives its own.
- On an engine that decodes, it queries our child first, which could have a part of the prompt. The engine would then
  compute the rest, although NIXL can load it from the other engine. NIXL loads every request prefilled elsewhere.

A prefill engine pins the blocks of a prompt until the decode engine has read them, or until NIXL's lease of 30 seconds
ends. A router that knows that no decode engine reads them ends the lease, see `tickets.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvbm.engines.vllm.media import is_computed_elsewhere
from kvbm.engines.vllm.tickets import Tickets
from kvbm.errors import ProfileError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

NIXL = 1
CHILDREN = (("DynamoConnector",), ("NixlConnector", "NixlPullConnector"))
_HINT = (
    '`"kv_connector_extra_config": {"connectors": [{"kv_connector": "DynamoConnector", ...}, '
    '{"kv_connector": "NixlConnector", ...}]}` of `--kv-transfer-config`'
)


@dataclass(frozen=True)
class PdHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vllm is not there when types are checked
    """The handshakes of all children of one rank, in the order of the children."""

    children: tuple[KVConnectorHandshakeMetadata | None, ...]


class PdConnector(MultiConnector):  # type: ignore[misc]
    """DynamoConnector first, NixlConnector second; any other list of children is a ProfileError."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        require_children(extra_config)
        return bool(super().requires_piecewise_for_cudagraph(extra_config))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        require_children(vllm_config.kv_transfer_config.kv_connector_extra_config)
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        entries = vllm_config.kv_transfer_config.kv_connector_extra_config
        require_children(entries)
        # Recompute blocks that cannot be loaded. DynamoConnector sets this for itself, but vLLM reads the parent's.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._tickets = Tickets(self._end_lease)

    def get_handshake_metadata(self) -> PdHandshake:
        return PdHandshake(tuple(child.get_handshake_metadata() for child in self._connectors))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], PdHandshake]) -> None:
        for index, child in enumerate(self._connectors):
            handshakes = {rank: handshake.children[index] for rank, handshake in metadata.items()}
            child.set_xfer_handshake_metadata_pp_aware(
                {rank: one for rank, one in handshakes.items() if one is not None}
            )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return NIXL's tokens for a request prefilled by another engine, else those of the first child with any.

        NIXL clears the flag when it schedules the pull. So after a failed pull or a preemption, the request is looked
        up in our cache like any other.
        """
        if not is_computed_elsewhere(request.kv_transfer_params):
            found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return found
        token_count, is_asynchronous = self._connectors[NIXL].get_num_new_matched_tokens(request, num_computed_tokens)
        if token_count:
            self._requests_to_connector[request.request_id] = NIXL
        return token_count, is_asynchronous

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        self._tickets.arrived(request.kv_transfer_params)

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, super().request_finished(request, blocks))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request, super().request_finished_all_groups(request, block_ids))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        self._tickets.sent(connector_output.finished_sending or ())

    def _finished(
        self, request: Request, result: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_pinned, address = result
        if is_pinned and address and address.get("do_remote_prefill"):
            self._tickets.pinned(request.kv_transfer_params, request.request_id)
        return result

    def _end_lease(self, request_id: str) -> None:
        """Let NIXL's workers free the blocks in the next step, as if the lease had ended. They ignore requests whose
        blocks they have freed."""
        nixl: Any = self._connectors[NIXL]
        leases = getattr(nixl.connector_scheduler, "_reqs_need_send", None)
        if leases is not None:  # another version of NIXL's connector lets the lease end by itself
            leases[request_id] = 0.0


def require_children(extra_config: Mapping[str, Any]) -> None:
    """ProfileError unless the configuration lists DynamoConnector and NixlConnector, in that order."""
    entries = extra_config.get("connectors")
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ProfileError("PdConnector requires a list `connectors` of its two children", hint=_HINT)
    names = [entry.get("kv_connector") if isinstance(entry, Mapping) else entry for entry in entries]
    if len(names) != len(CHILDREN) or any(name not in known for name, known in zip(names, CHILDREN, strict=True)):
        listed = ", ".join(str(name) for name in names) or "none"
        raise ProfileError(f"PdConnector requires DynamoConnector and then NixlConnector, not: {listed}", hint=_HINT)
