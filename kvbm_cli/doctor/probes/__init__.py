"""Probe programs that the doctor runs by path (`run_probe` in machine.py). The last line of JSON is the answer.

`engine` runs with the engine's interpreter. It does not import `kvbm_cli`, because that interpreter may lack it. `disk`
and `store` run with the interpreter of the command and import the other modules.
"""
