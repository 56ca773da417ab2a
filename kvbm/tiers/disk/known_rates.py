"""The file of KnownRates: how fast an engine computed and its disk delivered, in a small file for the next engine.

The disk process reads it when it opens and writes it between its commits: an engine with a thread in a disk that hangs
could never exit. It is written in place: a truncated or unreadable file counts as no file.
"""

from __future__ import annotations

import json
import logging
import os
import reprlib
from dataclasses import asdict
from pathlib import Path

from kvbm.errors import EnvironmentProblem
from kvbm.text.reading import parse_json
from kvbm.tiers.disk.files import open_private
from kvbm.tiers.rates import KnownRates

MAX_FILE_BYTES = 4096
TOKENS_PER_S = (1e-3, 1e9)  # limits of a rate in the file
BLOCKS_PER_S = (1e-6, 1e9)

log = logging.getLogger(__name__)


def read_rates(path: Path) -> KnownRates | None:
    """Return what an earlier engine wrote, if it is valid."""
    try:
        with os.fdopen(open_private(path, os.O_RDONLY), "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
        return _parse(parse_json(content))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EnvironmentProblem) as error:
        log.info("kvbm: ignoring %s: %s", path, error)
        return None


def write_rates(path: Path, known: KnownRates) -> None:
    """Write the file; a failure is logged."""
    try:
        with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.write(json.dumps(asdict(known)).encode())
            file.truncate()
    except (OSError, EnvironmentProblem) as error:
        log.info("kvbm: cannot write %s: %s", path, error)


def _parse(content: object) -> KnownRates:
    """Raise ValueError if `content` has no rates, or rates that no machine has."""
    if not isinstance(content, dict):
        raise ValueError("expected an object with rates")
    blocks_per_s = content.get("blocks_per_s")
    if blocks_per_s is not None and blocks_per_s != 0.0:
        blocks_per_s = _rate(blocks_per_s, BLOCKS_PER_S)
    return KnownRates(_rate(content.get("tokens_per_s"), TOKENS_PER_S), blocks_per_s)


def _rate(value: object, limits: tuple[float, float]) -> float:
    if not isinstance(value, float) or not limits[0] <= value <= limits[1]:
        raise ValueError(f"not a rate from {limits[0]:g} to {limits[1]:g}: {reprlib.repr(value)}")
    return value
