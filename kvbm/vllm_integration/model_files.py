"""Where the files of a model of vLLM are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.identity.digests import Unidentified

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
    path = Path(str(model.model))
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise Unidentified("models of ModelScope are not supported")
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            str(model.model), revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise Unidentified(f"`{model.model}` has no local files") from error
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit and Path(found).name != commit:
        raise Unidentified(f"`{model.model}` has files of commit {Path(found).name}, and a configuration of {commit}")
    return Path(found)
