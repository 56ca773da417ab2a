"""`kv_connector_config` names this module. The connector is in `kvbm/engines/trtllm`."""

from kvbm.engines.trtllm.connector import DynamoKVBMConnectorLeader, DynamoKVBMConnectorWorker

__all__ = ["DynamoKVBMConnectorLeader", "DynamoKVBMConnectorWorker"]
