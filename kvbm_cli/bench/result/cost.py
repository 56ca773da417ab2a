"""The cost of an arm: what the processes of its engine used, by tokens and requests, and what that costs in money.

Tokens are all prompt and answer tokens of answered requests, those from a cache included: users pay for them alike. The
time of a run goes from its first launch to the end of its last answer, so at a fixed rate money per token depends on
the rate. What is not measured is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from kvbm.config.document import plain_values, read_file, together
from kvbm.config.files import require_file
from kvbm.config.key_list import keys
from kvbm.config.mistakes import FileKind, mistakes_in
from kvbm.config.values import Section
from kvbm_cli.bench.result.results import Measurement, sum_if_known

HOURS_PER_MONTH = 730
GB = 1e9
PRICE_EXAMPLE = "a price list has two keys: `engine_price: 2.5` per hour, and `memory_price: 3` per gigabyte and month"


class PriceList(Section):
    """The file of `--price`. The prices are of one currency, whichever it is."""

    engine_price: float = Field(
        ge=0, le=1e9, allow_inf_nan=False, description="Of an engine's accelerators, or of its machine, per hour."
    )
    memory_price: float = Field(
        default=0.0, ge=0, le=1e9, allow_inf_nan=False, description="Of a gigabyte of host memory per month."
    )


def read_prices(path: Path) -> dict[str, float]:
    """Raise UsageError if there is no such file, ProfileError if it is wrong."""
    require_file(path, "price list", hint=PRICE_EXAMPLE)
    document = read_file(path, noun="price list")
    try:
        return PriceList.model_validate(plain_values(document)).model_dump()
    except ValidationError as error:
        kind = FileKind("price list", keys(PriceList), {"engine_price": PRICE_EXAMPLE})
        raise together(mistakes_in(error, document, path, kind)) from None


def cost_of(runs: Sequence[Measurement], prices: Mapping[str, float] | None) -> dict[str, float | None]:
    """Return the cost of all runs of an arm. `prices` is what `read_prices` returns."""
    answered = [record for run in runs for record in run.records if record.is_ok]
    output_tokens = sum(one.answer_token_count for one in answered)
    tokens = output_tokens + sum(one.prompt_tokens or 0 for one in answered)
    cpu_s = sum_if_known(run.server.get("cpu_s") for run in runs)
    used = {
        "cpu_s": cpu_s,
        "written_bytes": sum_if_known((run.server.get("disk") or {}).get("written_bytes") for run in runs),
        "energy_j": sum_if_known(run.server.get("energy_j") for run in runs),
    }
    peaks = [(run.server.get("peaks") or {}).get("rss_bytes") for run in runs]
    memory = None if None in peaks else max((float(peak) for peak in peaks if peak is not None), default=None)
    price = None if prices is None else _price(sum(map(span_s, runs)), memory, prices)
    return {
        "tokens_per_core_s": tokens / cpu_s if cpu_s else None,
        "output_tokens_per_core_s": output_tokens / cpu_s if cpu_s else None,
        "peak_memory_bytes": memory,
        **{
            f"{name}_per_1000_requests": 1e3 * value / len(answered) if value is not None and answered else None
            for name, value in used.items()
        },
        "price_per_1m_tokens": 1e6 * price / tokens if price is not None and tokens else None,
    }


def _price(duration_s: float, memory_bytes: float | None, prices: Mapping[str, float]) -> float | None:
    hours = duration_s / 3600
    memory_hour = prices["memory_price"] / HOURS_PER_MONTH
    if memory_hour and memory_bytes is None:
        return None
    return hours * (prices["engine_price"] + memory_hour * (memory_bytes or 0.0) / GB)


def span_s(run: Measurement) -> float:
    """Return the time from the first launch to the last end of an answered request; 0 without one."""
    answered = [record for record in run.records if record.is_ok]
    starts = [record.launched_ms for record in answered if record.launched_ms is not None]
    ends = [record.end_ms for record in answered if record.end_ms is not None]
    return (max(ends) - min(starts)) / 1e3 if starts and ends else 0.0
