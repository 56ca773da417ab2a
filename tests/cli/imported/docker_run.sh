docker run --rm --gpus all --ipc=host -p 8000:8000 \
  -v vllm-cache:/root/.cache/huggingface -e HF_TOKEN=$HF_TOKEN -e VLLM_LOGGING_LEVEL=DEBUG \
  vllm/vllm-openai:v0.12.0 --model mistralai/Mistral-7B-Instruct-v0.3 --max-model-len 16k
