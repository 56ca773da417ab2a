"""Opens the store of a URL for an engine.

    file:                       DirectoryStore
    mooncake:                   MooncakeStore
    s3: gs: az: memory: ...     ObstoreStore

A module is imported when its store is opened, because only then must its library be installed. The schemes that a
profile may have are SHARED_SCHEMES in `config/values.py`. Commands open a store in `kvbm_cli/store/inventory.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from kvbm.tiers.shared.keys import KeySpace
from kvbm.tiers.shared.object_store import ObjectStore
from kvbm.tiers.shared.settings import directory_of

LOCAL_STORES = ("file", "memory", "mooncake")  # the pages of files, and the pool, are in host memory already

log = logging.getLogger(__name__)


def open_store(url: str, threads: int, keys: KeySpace, facts: Mapping[str, object], *, writes: bool) -> ObjectStore:
    """May raise EnvironmentProblem."""
    description = json.dumps(facts, indent=1, sort_keys=True, default=str).encode()
    if url.startswith("mooncake://"):
        from kvbm.tiers.shared.stores.mooncake import MooncakeStore

        return MooncakeStore.open(url, batch_objects=threads, facts_key=keys.facts, facts=description, writes=writes)
    if (directory := directory_of(url)) is not None:
        from kvbm.tiers.shared.stores.directory import DirectoryStore

        return DirectoryStore.open(directory, threads=threads, facts_key=keys.facts, facts=description, writes=writes)
    from kvbm.tiers.shared.stores.obstore import ObstoreStore

    return ObstoreStore.open(url, threads=threads, facts_key=keys.facts, facts=description, writes=writes)


def with_copies(store: ObjectStore, url: str, directory: Path | None) -> ObjectStore:
    """Let engines with the same disk directory read an object once. A store on this machine needs no copies."""
    if directory is None or urlsplit(url).scheme in LOCAL_STORES:
        return store
    from kvbm.tiers.shared.stores.node_copies import NodeCopies

    try:
        return NodeCopies(store, directory, url)
    except OSError as error:
        log.warning("kvbm: this engine shares no copies of objects with other engines of this machine: %s", error)
        return store
