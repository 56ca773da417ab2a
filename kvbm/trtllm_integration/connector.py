"""`kv_connector_config` names this module, which is `kvbm.engines.trtllm.connector`."""

import sys

from kvbm.engines.trtllm import connector

sys.modules[__name__] = connector
