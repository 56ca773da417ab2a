"""Accesses a directory, or the nearest parent that exists. Prints `{"exists": ...}` if the filesystem responds."""

import json
import os
import sys


def main() -> None:
    path = wanted = os.path.abspath(sys.argv[1])
    while not os.path.exists(path):
        path = os.path.dirname(path)
    os.statvfs(path)
    if os.path.isdir(path) and os.access(path, os.R_OK):
        os.listdir(path)
    print(json.dumps({"exists": path == wanted}), flush=True)


if __name__ == "__main__":
    main()
