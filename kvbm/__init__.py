"""KV cache block manager for LLM engines: keeps blocks in host memory, on disk and in shared stores, and loads them.

Importing this package imports no torch and no engine, and reads no environment.
"""
