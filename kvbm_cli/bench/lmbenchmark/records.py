"""The records of a faithful run: one dict per request of the main run, failed requests included.

The caller adds `run`, `arm`, `cell` and `pair`. Times are in ms from the first tick of the main run. The intended
launch is the tick that launches the request: LMBenchmark has no launch times that are fixed before the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbm_cli.bench.lmbenchmark.exchange import Exchange

Record = dict[str, Any]


class RecordWriter:
    """Numbers the requests of one run, determines their phase, and passes their records on.

    A request is `cold` if its session has sent nothing before. It is `steady` once `session_count` sessions have sent
    something, and `fill` before that. The warm-up run counts.
    """

    def __init__(self, session_count: int, on_record: Callable[[Record], None]) -> None:
        self.records: list[Record] = []
        self._session_count = session_count
        self._on_record = on_record
        self._sessions: set[int] = set()
        self._next_index = 0
        self._start_s = 0.0

    def start(self, start_s: float) -> None:
        """Begin the main run."""
        self._start_s = start_s

    def warmed(self, session: int) -> None:
        """Note that the warm-up run has sent a request of this session."""
        self._sessions.add(session)

    def launched(self, session: int, turn: int) -> Record:
        """The first keys of the record of a request that is about to be sent."""
        phase = "fill"
        if session not in self._sessions:
            phase = "cold"
        elif len(self._sessions) >= self._session_count:
            phase = "steady"
        self._sessions.add(session)
        self._next_index += 1
        return {"index": self._next_index - 1, "session": session, "turn": turn, "phase": phase}

    def ended(self, record: Record, exchange: Exchange, intended_s: float) -> None:
        """Complete the record and hand it over."""
        record |= _outcome(exchange) | self._times(exchange, intended_s) | _token_counts(exchange)
        _add_derived(record)
        self.records.append(record)
        self._on_record(record)

    def _times(self, exchange: Exchange, intended_s: float) -> Record:
        return {
            "intended_ms": self._ms(intended_s),
            "launched_ms": self._ms(exchange.sent_s),
            "first_token_ms": self._ms(exchange.first_token_s),
            "first_text_ms": self._ms(exchange.first_text_s),
            "last_token_ms": self._ms(exchange.last_token_s),
            "end_ms": self._ms(exchange.end_s),
            "token_gaps_ms": [round(gap_s * 1e3, 4) for gap_s in exchange.token_gaps_s],
            "first_chunk_tokens": exchange.first_chunk_tokens,
        }

    def _ms(self, time_s: float | None) -> float | None:
        return None if time_s is None else round((time_s - self._start_s) * 1e3, 4)


def _outcome(exchange: Exchange) -> Record:
    return {
        "status": "ok" if exchange.error is None else "error",
        "error": exchange.error,
        "http_status": exchange.http_status,
        "token_ids": [],
        "logprobs": [],
        "text": exchange.text,
        "finish_reason": exchange.finish_reason,
    }


def _token_counts(exchange: Exchange) -> Record:
    details = (exchange.usage or {}).get("prompt_tokens_details") or {}
    tiers = details.get("cached_tokens_by_tier") or {}
    return {
        "prompt_tokens": exchange.token_count("prompt_tokens"),
        "output_tokens": exchange.token_count("completion_tokens"),
        "cached_tokens": details.get("cached_tokens"),
        "g1_tokens": tiers.get("device", 0) if tiers else None,
        "g2_tokens": tiers.get("host", 0) if tiers else None,
        "g3_tokens": tiers.get("disk", 0) if tiers else None,
    }


def _add_derived(record: Record) -> None:
    """Differences of times and counts; None if a part is missing."""

    def minus(end: str, start: str) -> float | None:
        return None if record[end] is None or record[start] is None else record[end] - record[start]

    record["ttft_ms"] = minus("first_token_ms", "intended_ms")
    record["ttft_from_launch_ms"] = minus("first_token_ms", "launched_ms")
    record["end_to_end_ms"] = minus("end_ms", "intended_ms")
    record["lateness_ms"] = minus("launched_ms", "intended_ms")
    record["computed_tokens"] = minus("prompt_tokens", "cached_tokens")
    decoded_ms = minus("last_token_ms", "first_token_ms")
    later_tokens = (record["output_tokens"] or 0) - record["first_chunk_tokens"]
    record["tpot_ms"] = decoded_ms / later_tokens if decoded_ms is not None and later_tokens > 0 else None
