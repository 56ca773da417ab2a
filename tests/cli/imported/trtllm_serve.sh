cat > /tmp/extra.yaml <<EOF
enable_attention_dp: false
kv_cache_config: {dtype: fp8, enable_partial_reuse: true}
EOF
DYN_KVBM_CPU_CACHE_GB=50 trtllm-serve serve nvidia/Llama-3.3-70B-Instruct-FP8 --tp_size 4 --max_seq_len 16384 \
  --kv_cache_free_gpu_memory_fraction 0.8 --tool_parser qwen3 --port 8001 --extra_llm_api_options /tmp/extra.yaml
