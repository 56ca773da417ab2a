"""Imports the modules in its arguments. Prints `{"seconds": ..., "error": null or the first line of the error}`."""

import importlib
import json
import sys
import time


def main() -> None:
    started = time.monotonic()
    error = None
    try:
        for module in sys.argv[1:]:
            importlib.import_module(module)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}".splitlines()[0]
    print(json.dumps({"seconds": time.monotonic() - started, "error": error}), flush=True)


if __name__ == "__main__":
    main()
