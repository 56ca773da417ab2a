"""Placement: refuses an engine in which the connector could not keep its promises, before the first request.

The connector is either the engine's only one, or a child of vLLM's MultiConnector or of our PdConnector. vLLM reads the
role and the failure policy of the outermost connector, which a child does not see. vLLM creates workers under
`set_current_vllm_config`, so the worker side can check it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvbm.errors import ProfileError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_IN_CONFIG = "in `--kv-transfer-config`"
# They load beside the steps, and only what another engine has prefilled for a request.
PD_CONNECTORS = frozenset({"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector"})


def require_role(config: KVTransferConfig) -> None:
    """ProfileError unless the connector may store and load. vLLM frees blocks too early for a role without loads."""
    if config.kv_role != "kv_both":
        raise ProfileError(
            f"{config.kv_connector} stores and loads blocks, but its kv_role is `{config.kv_role}`",
            hint=f'set `"kv_role": "kv_both"` {_IN_CONFIG}',
        )


def require_parent() -> None:
    """ProfileError unless the outermost connector of this worker's engine leaves ours what it needs."""
    engine: VllmConfig | None = get_current_vllm_config_or_none()
    if engine is None or engine.kv_transfer_config is None:
        return
    outermost = engine.kv_transfer_config
    parent = KVConnectorFactory.get_connector_class(outermost)
    if not issubclass(parent, MultiConnector):
        return
    name = parent.__name__
    if not outermost.is_kv_consumer:
        raise ProfileError(
            f"{name} has kv_role `{outermost.kv_role}`, with which vLLM reuses blocks too early for a load",
            hint=f'set `"kv_role": "kv_both"` of {name} {_IN_CONFIG}',
        )
    if outermost.kv_load_failure_policy != "recompute":
        raise ProfileError(
            f"{name} has kv_load_failure_policy `{outermost.kv_load_failure_policy}`, with which every block that "
            "cannot be loaded ends its request with an error",
            hint=f'set `"kv_load_failure_policy": "recompute"` of {name}, not of its children, {_IN_CONFIG}',
        )
    for child in _children(outermost):
        if _may_fail_in_a_step(child):
            raise ProfileError(
                f"{child.kv_connector} cannot run with kvbm in {name}: it may report a failed load after the step that "
                "computed with it, and kvbm would already have stored wrong blocks",
                hint=f"keep one of the two {_IN_CONFIG}",
            )
    members = list(_with_handshake(outermost))
    if len(members) > 1:
        raise ProfileError(
            f"{', '.join(members)} cannot run together in {name}, which hands the handshake of one child to all; "
            "PdConnector can run DynamoConnector with NixlConnector",
            hint="replace MultiConnector by PdConnector, see docs/guide/disaggregated.md, or keep one of the children",
        )


def loading_sibling() -> str:
    """Return a connector of this worker's engine that may load blocks that kvbm then stores, empty if there is none."""
    return next((str(child.kv_connector) for child in _all_connectors() if _may_load(child)), "")


def is_of_pair() -> bool:
    """Return whether this worker's engine prefills or decodes for another one."""
    return any(KVConnectorFactory.get_connector_class(one).__name__ in PD_CONNECTORS for one in _all_connectors())


def _all_connectors() -> Iterator[KVTransferConfig]:
    engine: VllmConfig | None = get_current_vllm_config_or_none()
    if engine is not None and engine.kv_transfer_config is not None:
        yield from _children(engine.kv_transfer_config)


def _may_load(config: KVTransferConfig) -> bool:
    """Whether a connector is neither ours, nor derived from ours, nor known to load nothing in its role."""
    connector: type[Any] = KVConnectorFactory.get_connector_class(config)
    is_producer = connector.__name__ in PD_CONNECTORS and not config.is_kv_consumer
    return not (is_producer or any(one.__module__.partition(".")[0] == "kvbm" for one in connector.__mro__))


def _children(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """Yield the connectors inside `config`, those of nested MultiConnectors too."""
    if not issubclass(KVConnectorFactory.get_connector_class(config), MultiConnector):
        yield config
        return
    for child in config.kv_connector_extra_config.get("connectors", ()):
        yield from _children(KVTransferConfig(**child))


def _may_fail_in_a_step(config: KVTransferConfig) -> bool:
    """Whether the connector reports failed blocks, and is not known to load before the step that uses them."""
    connector: type[Any] = KVConnectorFactory.get_connector_class(config)
    reports = connector.get_block_ids_with_load_errors
    is_ours = reports.__module__.partition(".")[0] == "kvbm"
    return not (
        is_ours or reports is KVConnectorBase_V1.get_block_ids_with_load_errors or connector.__name__ in PD_CONNECTORS
    )


def _with_handshake(config: KVTransferConfig) -> Iterator[str]:
    """Yield the connectors inside `config` that have a handshake. PdConnector counts as one: it separates those of its
    children."""
    connector: type[Any] = KVConnectorFactory.get_connector_class(config)
    if connector is not MultiConnector:
        if connector.get_handshake_metadata is not KVConnectorBase_V1.get_handshake_metadata:
            yield str(config.kv_connector)
        return
    for child in config.kv_connector_extra_config.get("connectors", ()):
        yield from _with_handshake(KVTransferConfig(**child))
