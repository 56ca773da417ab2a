"""The embedded block manager: keeps KV cache blocks outside device memory and brings them back.

Importing this package imports no torch and no engine, and reads no environment.
"""
