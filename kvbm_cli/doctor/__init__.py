"""`kvbm doctor`: what this machine and a directory can do, before an engine is started on them.

One module for each group of checks: environment, engine, memory, tiers, ports, disk, self_test. A group yields a
`Check` (result.py) as soon as it is known; `command` runs them, shows them and ends with the exit code. What the
groups may ask of the machine goes through `Machine` (machine.py), so that a test can say what the machine is like.
"""
