"""Where the time to first token goes: a linear model of TTFT over the tokens of a prompt by source. Pure.

    TTFT = base + load + computed * tokens computed + g2 * tokens from G2 + g3 * tokens from G3 + g4 * tokens from G4

`load` is added once to a request with any token from G2, G3 or G4. All coefficients are at least 0, because no token
takes negative time. Least squares with that limit has its minimum in one of the subsets of the columns, and there are
few, so each is tried. A model is returned only if the data identify every coefficient: see `fit_ttft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

LEAST_REQUESTS_PER_COEFFICIENT = 10
MOST_COLLINEAR = 0.95
LEAST_EXPLAINED = 0.5


@dataclass(frozen=True, slots=True)
class PromptTime:
    """TTFT of one request from its launch, and where the tokens of its prompt came from."""

    ttft_ms: float
    computed_tokens: int
    g2_tokens: int
    g3_tokens: int
    g4_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TtftModel:
    """Milliseconds per request (`base`, `load`) and per token (others).

    A coefficient is `None` if the number of its tokens was the same in all requests. `load_ms` is also `None` if hits
    and their tokens change together. `explained` is R squared.
    """

    base_ms: float
    load_ms: float | None
    computed_ms_per_token: float
    g2_ms_per_token: float | None
    g3_ms_per_token: float | None
    explained: float
    request_count: int
    g4_ms_per_token: float | None = None

    @property
    def g2_break_even_tokens(self) -> float | None:
        return self._break_even(self.g2_ms_per_token)

    @property
    def g3_break_even_tokens(self) -> float | None:
        return self._break_even(self.g3_ms_per_token)

    @property
    def g4_break_even_tokens(self) -> float | None:
        return self._break_even(self.g4_ms_per_token)

    def _break_even(self, per_token_ms: float | None) -> float | None:
        """Tokens from which loading takes less time than computing; `None` if loading is never faster, or unknown."""
        if per_token_ms is None or self.load_ms is None or per_token_ms >= self.computed_ms_per_token:
            return None
        return self.load_ms / (self.computed_ms_per_token - per_token_ms)


@dataclass(frozen=True, slots=True)
class NoModel:
    """No TTFT model can be fitted, and why."""

    reason: str


def fit_ttft(requests: Sequence[PromptTime]) -> TtftModel | NoModel:
    """Fit the model. `NoModel` if there are too few requests, if the tokens computed are always the same, if two
    columns grow together, or if the model explains less than half of the variance."""
    import numpy as np

    columns = _columns(requests)
    needed = LEAST_REQUESTS_PER_COEFFICIENT * (len(columns) + 1)
    if len(requests) < needed:
        return NoModel(f"{len(requests)} requests are too few for {len(columns) + 1} coefficients, {needed} are needed")
    if "computed" not in columns:
        return NoModel("all requests computed the same number of tokens")
    if "load" in columns and _collinear(columns):
        del columns["load"]  # the cost per request is the least of the unknowns; break-even lengths are then unknown
    if collinear := _collinear(columns):
        return NoModel(f"{collinear[0]} and {collinear[1]} change together, so their costs cannot be separated")
    times = np.array([request.ttft_ms for request in requests])
    coefficients, explained = _least_squares(columns, times)
    if explained < LEAST_EXPLAINED:
        return NoModel(f"the tokens of the prompts explain only {explained:.0%} of the variance of TTFT")
    return TtftModel(
        base_ms=coefficients["base"],
        load_ms=coefficients.get("load"),
        computed_ms_per_token=coefficients["computed"],
        g2_ms_per_token=coefficients.get("g2"),
        g3_ms_per_token=coefficients.get("g3"),
        explained=explained,
        request_count=len(requests),
        g4_ms_per_token=coefficients.get("g4"),
    )


def _columns(requests: Sequence[PromptTime]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the columns that vary. The constant column of the base is not among them."""
    import numpy as np

    columns = {
        "computed": np.array([request.computed_tokens for request in requests], dtype=float),
        "g2": np.array([request.g2_tokens for request in requests], dtype=float),
        "g3": np.array([request.g3_tokens for request in requests], dtype=float),
        "g4": np.array([request.g4_tokens for request in requests], dtype=float),
        "load": np.array([_loaded(request) > 0 for request in requests], dtype=float),
    }
    return {name: column for name, column in columns.items() if len(column) and np.ptp(column) > 0}


def _loaded(request: PromptTime) -> int:
    return request.g2_tokens + request.g3_tokens + request.g4_tokens


def _collinear(columns: dict[str, np.ndarray[Any, Any]]) -> tuple[str, str] | None:
    """Return the column that the others predict best and the one it follows most, if they predict it nearly
    completely."""
    import numpy as np

    for name, column in columns.items():
        others = {other: values for other, values in columns.items() if other != name}
        if not others:
            continue
        design = np.column_stack([np.ones(len(column)), *others.values()])
        residual = column - design @ np.linalg.lstsq(design, column, rcond=None)[0]
        if 1 - residual.var() / column.var() > MOST_COLLINEAR:
            closest = max(others, key=lambda other: abs(np.corrcoef(column, others[other])[0, 1]))
            return name, closest
    return None


def _least_squares(
    columns: dict[str, np.ndarray[Any, Any]], times: np.ndarray[Any, Any]
) -> tuple[dict[str, float], float]:
    """Coefficients, none negative, and the share of the variance that they explain."""
    import numpy as np

    all_columns = {"base": np.ones(len(times)), **columns}
    best, least = dict.fromkeys(all_columns, 0.0), float(times @ times)
    for size in range(1, len(all_columns) + 1):
        for names in combinations(all_columns, size):
            design = np.column_stack([all_columns[name] for name in names])
            found = np.linalg.lstsq(design, times, rcond=None)[0]
            left = float(((times - design @ found) ** 2).sum())
            if found.min() >= 0 and left < least:
                best = {**dict.fromkeys(all_columns, 0.0), **dict(zip(names, map(float, found), strict=True))}
                least = left
    total = float(((times - times.mean()) ** 2).sum())
    return best, max(0.0, 1 - least / total) if total else 0.0
