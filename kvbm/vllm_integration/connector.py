"""`--kv-transfer-config` names this module, which is `kvbm.engines.vllm.connector`."""

import sys

from kvbm.engines.vllm import connector

sys.modules[__name__] = connector
