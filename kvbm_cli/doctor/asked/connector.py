"""Imports the module that its argument names: `{"seconds": ..., "error": null or the last line of what went wrong}`."""

import importlib
import json
import sys
import time


def main() -> None:
    started = time.monotonic()
    error = None
    try:
        importlib.import_module(sys.argv[1])
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}".splitlines()[0]
    print(json.dumps({"seconds": time.monotonic() - started, "error": error}), flush=True)


if __name__ == "__main__":
    main()
