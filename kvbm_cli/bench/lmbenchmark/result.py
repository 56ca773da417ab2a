"""What a faithful run returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbm.errors import EnvironmentProblem
from kvbm_cli.bench.records.request_record import RequestRecord


@dataclass(frozen=True, slots=True)
class FaithfulResult:
    """`csv` has the answers of the main run, `records` its requests in the order in which they ended.

    `started_unix_s` is the first tick of the main run; `duration_s` includes the wait for the last answers. `notes` are
    sentences about what the CSV file does not show.
    """

    records: tuple[RequestRecord, ...]
    csv: str
    notes: tuple[str, ...]
    started_unix_s: float
    duration_s: float
    warm_up_requests: int


def require_an_answer(warm_up: Sequence[RequestRecord]) -> None:
    """Raise EnvironmentProblem if every request of a warm-up failed."""
    if warm_up and not any(record.is_ok for record in warm_up):
        raise EnvironmentProblem(
            f"the server answered none of the {len(warm_up)} requests of the warm-up: {warm_up[0].error}",
            hint="check the address, the name of the model, and the length that the model supports",
        )


def notes_on(
    records: Sequence[RequestRecord], warm_up: Sequence[RequestRecord], *, delayed: int = 0
) -> tuple[str, ...]:
    failed = sum(not record.is_ok for record in records)
    uncounted = sum(record.is_ok and not (record.prompt_tokens and record.output_tokens) for record in records)
    empty = sum(record.is_ok and record.first_text_ms is None for record in records)
    failed_warm_up = sum(not record.is_ok for record in warm_up)
    counts = (
        (failed, f"{failed} of {len(records)} requests failed; the CSV file has no rows for them"),
        (uncounted, f"{uncounted} answers had no token counts; the CSV file has 0 there"),
        (empty, f"{empty} answers had no text; the CSV file has a time to first token of 0 for them"),
        (delayed, f"{delayed} requests were launched late because the answer before them was late"),
        (failed_warm_up, f"{failed_warm_up} of {len(warm_up)} requests of the warm-up failed"),
    )
    return tuple(note for count, note in counts if count)
