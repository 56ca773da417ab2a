"""Probe programs that the doctor runs by path, with the engine's interpreter. Each prints one line of JSON.

They do not import `kvbm_cli`, because that interpreter may lack it.
"""
