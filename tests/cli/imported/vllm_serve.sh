#!/bin/bash
ORG=${ORG:-meta-llama}
export HF_TOKEN=hf_0123456789abcdefghij DYN_KVBM_CPU_CACHE_GB=64
export DYN_KVBM_DISK_CACHE_GB=500 DYN_KVBM_DISK_CACHE_DIR=/nvme/kvbm
export DYN_KVBM_OBJECT_BUCKET=kv DYN_KVBM_OBJECT_SECRET_KEY=hunter2hunter2

ARGS=(
  --tensor-parallel-size 4  # of 8 GPUs
  --gpu-memory-utilization=0.92
)
ARGS+=(--api-key "sk-very-secret-text" --no-enable-prefix-caching)
if [ -n "$DEBUG" ]; then
  ARGS+=(--enforce-eager)
fi

cat > /tmp/ready.txt <<END
vllm serve is not a command here
END

exec vllm serve "$ORG/Llama-3.3-70B-Instruct" "${ARGS[@]}" \
  --served-model-name llama llama-70b \
  --kv-transfer-config '{"kv_connector": "DynamoConnector", "kv_role": "kv_both", "engine_id": "a1",
    "kv_connector_module_path": "kvbm.vllm_integration.connector"}' \
  --compilation-config.cudagraph_mode PIECEWISE \
  --max-num-seqs $(nproc) --port $PORT -O3 \
  $EXTRA_ARGS 2>&1 | tee vllm.log
