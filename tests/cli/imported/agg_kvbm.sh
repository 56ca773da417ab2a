#!/usr/bin/env bash
set -euo pipefail
trap 'kill 0' EXIT

# The frontend answers HTTP, the worker has the cache.
python3 -m dynamo.frontend --http-port 8000 &

DYN_KVBM_CPU_CACHE_GB=8 DYN_KVBM_METRICS=1 \
DYN_KVBM_LEADER_ZMQ_PUB_PORT=56001 \
  python3 -m dynamo.vllm \
    --model meta-llama/Llama-3.1-8B-Instruct \
    --connector kvbm \
    --enforce-eager
