"""Saves the tokenizer of the synthetic models, for load clients that count tokens themselves.

    python -m kvbm_cli.save_tokenizer DIRECTORY

The directory also gets a `config.json`, because some clients read the model's type from it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvbm.engines.embedded.engine.synthetic_models import SYNTHETIC
from kvbm.engines.embedded.engine.tokenizer import byte_tokenizer


def save(directory: Path) -> None:
    byte_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(SYNTHETIC["tiny"], indent=2) + "\n")


def main(arguments: list[str]) -> int | str:
    """Return the exit status, or a message for stderr."""
    usage = "usage: python -m kvbm_cli.save_tokenizer DIRECTORY"
    if arguments in (["--help"], ["-h"]):
        print(usage)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        return usage
    directory = Path(arguments[0])
    if directory.exists():
        return f"error: `{directory}` exists already"
    try:
        save(directory)
    except OSError as error:
        return f"error: `{directory}` cannot be written: {error.strerror}"
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
