"""Programs that an engine's interpreter runs for the doctor, by path. Each prints one line of JSON and nothing else.

That interpreter need not have `kvbm_cli`, so they import nothing of it.
"""
