"""Opens the store of a URL for a command: a directory, or a store of obstore. Mooncake Store cannot list its objects.

A module is imported when its store is opened, because only then must its library be installed.
"""

from __future__ import annotations

from kvbm.tiers.shared.settings import directory_of
from kvbm_cli.store.access import StoreAccess
from kvbm_cli.store.inventory import Inventory

INVENTORY_LIMIT_S = 30.0  # of one request


def open_access(url: str, limit_s: float) -> StoreAccess:
    """Connect to a store, whose requests end within that time. Raises EnvironmentProblem."""
    if (directory := directory_of(url)) is not None:
        from kvbm.tiers.shared.stores.directory import require_directory
        from kvbm_cli.store.directory_access import DirectoryAccess

        require_directory(directory)
        return DirectoryAccess(directory)
    from kvbm.tiers.shared.stores.obstore import connection
    from kvbm_cli.store.obstore_access import ObstoreAccess

    return ObstoreAccess(connection(url)(limit_s))


def open_inventory(url: str) -> Inventory:
    """May raise EnvironmentProblem."""
    return Inventory(open_access(url, INVENTORY_LIMIT_S), url)
