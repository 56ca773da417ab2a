"""`--hicache-storage-backend-extra-config` names this module. The storage is in `kvbm/engines/sglang`."""

from kvbm.engines.sglang.storage import KvbmHiCacheStorage

__all__ = ["KvbmHiCacheStorage"]
