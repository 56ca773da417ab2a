#!/bin/bash
# SGLang with a storage of its own below its hierarchical cache.
export SGLANG_LOGGING_CONFIG_PATH=/etc/sglang/log.json
export HF_TOKEN=hf_0123456789abcdefghij
python3 -m sglang.launch_server \
  --model-path Qwen/Qwen3-32B --served-model-name qwen3 \
  --host 0.0.0.0 --port 30000 \
  --tp 4 --page-size 64 --context-length 65536 --mem-fraction-static 0.85 \
  --enable-hierarchical-cache --hicache-ratio 2 --hicache-mem-layout page_first \
  --hicache-io-backend kernel --hicache-write-policy write_through \
  --hicache-storage-backend mooncake \
  --hicache-storage-backend-extra-config '{"master_server_address": "10.0.0.1:50051", "prefetch_threshold": 128}' \
  --enable-metrics --enable-cache-report --log-requests --log-requests-level 1 \
  --cuda-graph-bs-decode 1 2 4 8 --kv-cache-dtype fp8_e4m3 --api-key sk-very-secret
