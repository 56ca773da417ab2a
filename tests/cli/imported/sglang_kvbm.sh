sglang serve --model-path Qwen/Qwen3-8B --trust-remote-code --page-size 128 \
  --enable-hicache --hicache-size 100 --hicache-mem-layout page_first_direct \
  --hicache-storage-backend dynamic \
  --hicache-storage-backend-extra-config '{
    "backend_name": "kvbm", "interface_v1": 1,
    "module_path": "kvbm.sglang_integration.storage", "class_name": "KvbmHiCacheStorage",
    "hicache_storage_pass_prefix_keys": true,
    "kvbm": {"tiers": {"disk": {"directory": "/mnt/nvme/kvbm", "capacity": "200GB"}}}
  }'
