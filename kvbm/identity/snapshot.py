"""The local files of a model: its own directory, or its snapshot in the cache of the hub.

In the cache, the file `refs/main` says which commit the name of a model means. A download may change it at any time, to
a commit whose files are old. So nothing is known about an engine's weights if it changed while the engine was there.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvbm.identity.digests import Unidentified
from kvbm.identity.loading import require_unchanged


def snapshot_of(model: str, revision: str | None, cache: str | None = None) -> Path:
    """Return the local directory of a model. `cache`: of the hub, if it is not the usual one. Raises Unidentified."""
    if model and os.path.isdir(model):
        return Path(model)
    found, reference = hub_snapshot(model, revision, cache)
    if reference.is_file():  # a revision that is a commit has none
        require_unchanged(reference)
    return found


def hub_snapshot(name: str, revision: str | None = None, cache: str | None = None) -> tuple[Path, Path]:
    """Return the snapshot that a name of the hub means now, and the file that says so. Raises Unidentified."""
    try:
        from huggingface_hub import snapshot_download

        found = Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise Unidentified(f"`{name}` has no local files") from error
    return found, found.parents[1] / "refs" / (revision or "main")
