#!/bin/bash
MODEL="meta-llama/Llama-3.1-8B-Instruct"
LENGTH=16384
export PYTHONHASHSEED=0

python -m dynamo.frontend &

# Decode
CUDA_VISIBLE_DEVICES=0 python3 -m dynamo.vllm --model $MODEL --connector nixl --max-model-len "$LENGTH" &

# Prefill, with host memory
DYN_VLLM_KV_EVENT_PORT=20090 \
VLLM_NIXL_SIDE_CHANNEL_PORT=20098 \
DYN_KVBM_CPU_CACHE_GB=32 \
CUDA_VISIBLE_DEVICES=1 \
  python3 -m dynamo.vllm --model $MODEL \
    --is-prefill-worker \
    --connector kvbm nixl \
    --max-model-len "$LENGTH"
