"""`--hicache-storage-backend-extra-config` names this module, which is `kvbm.engines.sglang.storage`."""

import sys

from kvbm.engines.sglang import storage

sys.modules[__name__] = storage
