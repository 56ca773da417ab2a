"""`python -m kvbm.embedded`: the embedded engine, which is in `kvbm/engines/embedded`."""

import runpy

runpy.run_module("kvbm.engines.embedded", run_name="__main__")
