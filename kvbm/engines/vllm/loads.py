"""Loads: what the files of a model were before vLLM loaded them, and after.

vLLM has no hook for a connector before it loads a model. So `register` is an entry point of `vllm.general_plugins`,
which vLLM calls in each of its processes. It wraps the constructor of the executor, which loads the model: in the
process of the scheduler, before the connector exists. An engine without kvbm, or whose blocks do not outlive it, pays
nothing.

If vLLM did not call `register` (`VLLM_PLUGINS` leaves it out, or kvbm is not installed as a package), the files must
have been quiet since a minute before the process started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.engines.engine_code import replace

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvbm.identity.digests import Unidentified
    from kvbm.identity.loading import FileContent, Loading

EXECUTOR = "vllm.v1.executor.abstract"
OURS = "kvbm."

_LOADED: dict[str, FileContent | Unidentified] = {}  # by the absolute path of the directory
_CONFIGS: list[VllmConfig] = []  # of the last executor


def register() -> None:
    """Look at the model's files before and after each executor of this process loads them."""
    replace(getattr(sys.modules.get(EXECUTOR), "Executor", None), "__init__", _looking)


def _looking(load: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, vllm_config: Any, *arguments: Any, **keys: Any) -> None:
        _CONFIGS[:] = [vllm_config]
        loadings = dict(_begun(vllm_config))
        load(self, vllm_config, *arguments, **keys)
        if loadings:
            from kvbm.identity.loading import ended

            _LOADED.update({path: ended(loading) for path, loading in loadings.items()})

    return __init__


def last_config() -> VllmConfig | None:
    """Return the configuration of the engine that loaded its model last in this process, for code of ours that vLLM
    gives none. None if vLLM did not call `register`."""
    return _CONFIGS[0] if _CONFIGS else None


def content_of(directory: Path, *, every: bool = False) -> FileContent:
    """Return the content of the files that vLLM has loaded from a directory, with `every` of all that it has.

    Raises Unidentified or OSError.
    """
    from kvbm.identity import loading

    return loading.content_of(directory, _LOADED.get(os.path.abspath(directory)), every=every)


def models_of(vllm_config: VllmConfig) -> list[tuple[Any, Any]]:
    """Return the configuration of each model, and how its files are loaded: of the target first, then of a draft."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    draft_load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    models = [(vllm_config.model_config, vllm_config.load_config)]
    if draft is not None and draft.model != vllm_config.model_config.model:
        models.append((draft, draft_load))
    return models


def directory_of(model: Any, load: Any) -> Path:
    """Return the local directory of a model: its own, or its snapshot in the cache of the hub. Raises Unidentified."""
    from kvbm.identity.digests import Unidentified
    from kvbm.identity.snapshot import snapshot_of

    path = Path(str(model.model))
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise Unidentified("models of ModelScope are not supported")
    found = snapshot_of(str(model.model), model.revision, load.download_dir)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit and found.name != commit:
        raise Unidentified(f"`{model.model}` has files of commit {found.name}, and a configuration of {commit}")
    return found


def runs_its_code(model: Any) -> bool:
    """Return whether vLLM may run code of the model's directory, which can read any file."""
    return bool(getattr(model, "trust_remote_code", False))


def _begun(vllm_config: Any) -> Iterator[tuple[str, Loading | Unidentified]]:
    """Yield the loads of a model and of a draft model. Raises nothing: vLLM loads whatever happens here."""
    if getattr(vllm_config, "lora_config", None) is not None or not any(_keeps_blocks(vllm_config)):
        return
    from kvbm.identity.digests import Unidentified
    from kvbm.identity.loading import begun

    for model, load in models_of(vllm_config):
        try:
            directory = directory_of(model, load)
        except (Unidentified, OSError):
            continue  # the files are not there yet; the connector says why nothing is kept
        yield os.path.abspath(directory), begun(directory, every=runs_its_code(model))


def _keeps_blocks(vllm_config: Any) -> Iterator[bool]:
    """Yield for each connector of kvbm whether its blocks may outlive the engine."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    for extra_config in () if transfer is None else _extra_configs(vars(transfer)):
        from kvbm.config.connector import resolve_connector
        from kvbm.errors import ProfileError

        try:
            tiers = resolve_connector(extra_config, os.environ, engine="vllm", warns=False).tiers
        except ProfileError:
            continue  # the connector says what is wrong
        yield tiers.outlive_engine


def _extra_configs(transfer: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the configurations of kvbm's connectors, also of those in a MultiConnector, and of its tiers below vLLM's
    own offloading."""
    extra_config = (transfer.get("kv_connector_extra_config") or {}) if isinstance(transfer, Mapping) else None
    if not isinstance(extra_config, Mapping):
        return
    if str(transfer.get("kv_connector_module_path")).startswith(OURS):
        yield extra_config
    for tier in extra_config.get("secondary_tiers") or ():
        if isinstance(tier, Mapping) and str(tier.get("module_path")).startswith(OURS):
            yield tier
    for inner in extra_config.get("connectors") or ():
        yield from _extra_configs(inner)
