"""`kvbm doctor`: checks a machine and a directory before an engine is started on them.

Each group of checks has a generator in environment, engine (also of ports), memory (also of the order of tiers), disk,
store or self_test. It yields each `Check` (check.py) as soon as its result is known. `command` runs the groups, prints
the checks and returns the exit code. The groups reach the machine only through `Machine` (machine.py), which tests
replace.
"""
