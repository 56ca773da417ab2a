"""TensorRT-LLM integration: the connector, under the module path and class names of NVIDIA's."""
