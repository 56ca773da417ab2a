"""Rates: how fast this engine computes tokens and how fast its disk delivers blocks, measured while both run.

They decide whether blocks on disk are worth reading, how many of a chain, and when a read has become hopeless. Older
work counts less, so that a slower disk or a busier engine is noticed within a few requests. While the disk's rate is
unknown, or has not been measured for long, one request tries to read; `is_hopeless` limits what that can cost.

`RatesFile` keeps both rates in a small file of the disk tier's directory. The next engine with the same namespace uses
them to judge its first request. One thread owns both classes.
"""

from __future__ import annotations

import json
import logging
import os
import reprlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvbm.disk.files import open_private
from kvbm.errors import EnvironmentProblem

MIN_STEP_TOKENS = 64  # the duration of a step with fewer tokens is a fixed cost
KEPT = 0.8  # weight of the older samples, per sample
TRIAL_INTERVAL_S = 30.0
GRACE = 0.06  # a read may take longer than computing by this part
GRACE_S = 0.005  # or by this time, which is too short to notice
BLIND_S = 0.2  # limit of a read while the rate of computing is unknown
KNOWN_S = 0.1  # weight of an earlier engine's rates, in seconds of work

WRITE_INTERVAL_S = 10.0
WORTH_WRITING = 1.2  # a rate that changed by a smaller factor is not written
MAX_FILE_BYTES = 4096
TOKENS_PER_S = (1e-3, 1e9)  # limits of a rate in the file
BLOCKS_PER_S = (1e-6, 1e9)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownRates:
    """Rates of an engine. 0 blocks per second means that no block arrived in time, None that nothing was measured."""

    tokens_per_s: float
    blocks_per_s: float | None = None

    def differ(self, other: KnownRates) -> bool:
        """Whether one of the rates differs by more than WORTH_WRITING."""
        pairs = (self.tokens_per_s, other.tokens_per_s), (self.blocks_per_s or 0.0, other.blocks_per_s or 0.0)
        return any(max(pair) > WORTH_WRITING * min(pair) for pair in pairs)


class Rates:
    """See the module's text. `clock` returns seconds; `known` are the rates of an earlier engine."""

    def __init__(self, *, block_tokens: int, clock: Callable[[], float], known: KnownRates | None = None) -> None:
        self._block_tokens = block_tokens
        self._clock = clock
        self._tokens, self._computing_s = 0.0, 0.0
        self._blocks, self._reading_s = 0.0, 0.0
        self._sampled_s = float("-inf")
        if known is not None:
            self._tokens, self._computing_s = KNOWN_S * known.tokens_per_s, KNOWN_S
            if known.blocks_per_s is not None:
                self._blocks, self._reading_s = KNOWN_S * known.blocks_per_s, KNOWN_S

    def note_step(self, tokens: int, seconds: float) -> None:
        """Note that the engine computed `tokens` tokens in one step."""
        if tokens >= MIN_STEP_TOKENS and seconds > 0:
            self._tokens = KEPT * self._tokens + tokens
            self._computing_s = KEPT * self._computing_s + seconds

    def note_read(self, blocks: int, seconds: float) -> None:
        """Note that a request waited `seconds` for `blocks` blocks from disk."""
        self._blocks = KEPT * self._blocks + blocks
        self._reading_s = KEPT * self._reading_s + seconds
        self._sampled_s = self._clock()

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the engine computes per second; 0 if unknown."""
        return self._tokens / self._computing_s if self._computing_s else 0.0

    @property
    def blocks_per_s(self) -> float:
        """Blocks that the disk delivers per second; 0 if unknown, or if none arrived in time."""
        return self._blocks / self._reading_s if self._reading_s else 0.0

    def known(self) -> KnownRates | None:
        """Return the rates for the next engine; None while the rate of computing is unknown."""
        if not self.tokens_per_s:
            return None
        return KnownRates(self.tokens_per_s, self.blocks_per_s if self._reading_s else None)

    def worthwhile(self, spans: Sequence[tuple[bool, int]]) -> int:
        """Return how many blocks of a chain to load: the beginning that saves most time.

        `spans` are consecutive parts of the chain as (is on disk, blocks).
        """
        total = sum(count for _, count in spans)
        if not any(is_on_disk for is_on_disk, _ in spans) or not (self._computing_s and self._reading_s):
            return total
        read_s = self._reading_s / self._blocks if self._blocks else float("inf")
        compute_s = self._block_tokens / self.tokens_per_s
        best_s, best, saved_s, end = 0.0, 0, 0.0, 0
        for is_on_disk, count in spans:
            saved_s += count * (compute_s - read_s if is_on_disk else compute_s)
            end += count
            if saved_s > best_s:
                best_s, best = saved_s, end
        if best < total and self._clock() - self._sampled_s > TRIAL_INTERVAL_S:
            self._sampled_s = self._clock()  # one trial at a time
            return total
        return best

    def is_hopeless(self, *, waited_s: float, blocks: int, of_blocks: int) -> bool:
        """Whether a request that has waited `waited_s` and got the first `blocks` of its `of_blocks` should compute the
        rest.

        True as soon as computing the blocks that have arrived would have taken less time than the wait, plus a grace.
        So a request that stops waiting is later than one that computes everything by at most the grace.
        """
        if not self._computing_s:
            return waited_s > BLIND_S
        compute_s = self._block_tokens / self.tokens_per_s
        return waited_s > blocks * compute_s + max(GRACE * of_blocks * compute_s, GRACE_S)


class RatesFile:
    """The rates in a file, for the next engine. `clock` returns seconds.

    A thread writes it, so that a hanging disk delays no step. It is written in place: a truncated or unreadable file
    counts as no file.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._written: KnownRates | None = None
        self._due_s = clock()
        self._thread: threading.Thread | None = None

    def read(self) -> KnownRates | None:
        """Return what an earlier engine wrote, if it is valid."""
        try:
            with os.fdopen(open_private(self._path, os.O_RDONLY), "rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
            return _parse(json.loads(content))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, EnvironmentProblem) as error:
            log.info("kvbm: ignoring %s: %s", self._path, error)
            return None

    def keep(self, known: KnownRates | None) -> None:
        """Start to write `known` if it has changed and WRITE_INTERVAL_S is over. Call at every step."""
        if known is None or self._clock() < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        self._due_s = self._clock() + WRITE_INTERVAL_S
        if self._written is None or known.differ(self._written):
            thread = threading.Thread(target=self._write, args=(known,), name="kvbm-rates", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread available; tried again after WRITE_INTERVAL_S
                return
            self._written, self._thread = known, thread

    def _write(self, known: KnownRates) -> None:
        try:
            with os.fdopen(open_private(self._path, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.write(json.dumps(asdict(known)).encode())
                file.truncate()
        except (OSError, EnvironmentProblem) as error:
            log.info("kvbm: cannot write %s: %s", self._path, error)


def _parse(content: object) -> KnownRates:
    """Raises ValueError if `content` has no rates, or rates that no machine has."""
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
