"""The local directory of a model that is named by a path or by its name on the hub."""

from __future__ import annotations

import os
from pathlib import Path

from kvbm.identity.digests import Unidentified


def snapshot_of(model: str, revision: str | None) -> Path:
    """Return the local directory of a model: its own, or its snapshot in the cache of the hub. Raises Unidentified."""
    if model and os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise Unidentified(f"`{model}` has no local files") from error
