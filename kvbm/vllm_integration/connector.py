"""`--kv-transfer-config` names this module. The connector is in `kvbm/engines/vllm`."""

from kvbm.engines.vllm.connector import DynamoConnector, __getattr__

__all__ = ["DynamoConnector", "__getattr__"]
