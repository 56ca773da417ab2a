"""Results: the runs of an experiment with the record of each request, read from the files of its directory.

All that is printed follows from them. A failed request has a record too, with `error` set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import NoneType
from typing import Any, TypeVar

from kvbm.errors import UsageError
from kvbm_cli.bench.result.directory import FORMAT, LEFT_OUT, PLAN, REQUESTS, BenchDirectory, cell_plan
from kvbm_cli.bench.workload.plan import Plan
from kvbm_cli.bench.workload.script import Phase
from kvbm_cli.bench.workload.slo import Slo

_Number = TypeVar("_Number", int, float)
_TYPES_OF_ANNOTATION: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "str | None": (str, NoneType),
    "int | None": (int, NoneType),
    "float | None": (float, int, NoneType),
    "list[int]": (list,),
    "list[float]": (list,),
}

LOADED = ("g2", "g3", "g4")  # the tiers below the device
TIERS = ("g1", *LOADED, "computed")  # where prompt tokens came from
ALL = "all"  # the primary phase of a cell in which no request can reuse anything
DIGITS = 4


@dataclass(slots=True)
class RequestRecord:
    """Times are in milliseconds since the start of the run; `None` if the event never happened.

    `intended_ms` is the planned launch; in a closed loop, the moment at which the request could start. `launched_ms` is
    right before the first byte is written. `first_token_ms` is the first chunk with text, reasoning or token ids,
    `first_text_ms` the first with text of the answer. `first_chunk_tokens` arrived together; `token_gaps_ms` has one
    value per later token.

    `cached_tokens` is the part of the prompt that was not computed. `g1_tokens` to `g4_tokens` split it by tier; they
    are `None` if the engine does not report it per request. `text` is empty if there are token ids.
    """

    run: str
    arm: str
    cell: str
    pair: int
    index: int
    session: int
    turn: int
    phase: str
    intended_ms: float | None = None
    error: str | None = None
    http_status: int | None = None
    launched_ms: float | None = None
    first_token_ms: float | None = None
    first_text_ms: float | None = None
    last_token_ms: float | None = None
    end_ms: float | None = None
    first_chunk_tokens: int = 0
    token_gaps_ms: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    g1_tokens: int | None = None
    g2_tokens: int | None = None
    g3_tokens: int | None = None
    g4_tokens: int | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def key(self) -> tuple[int, int]:
        return self.session, self.turn

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token from the intended launch, which is what the user waits."""
        return _difference(self.first_token_ms, self.intended_ms)

    @property
    def ttft_from_launch_ms(self) -> float | None:
        return _difference(self.first_token_ms, self.launched_ms)

    @property
    def end_to_end_ms(self) -> float | None:
        return _difference(self.end_ms, self.intended_ms)

    @property
    def lateness_ms(self) -> float | None:
        return _difference(self.launched_ms, self.intended_ms)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first chunk; `None` with fewer than one such token."""
        later = (self.output_tokens or len(self.token_ids)) - self.first_chunk_tokens
        span_ms = _difference(self.last_token_ms, self.first_token_ms)
        return span_ms / later if span_ms is not None and later > 0 else None

    @property
    def answer_token_count(self) -> int:
        """Tokens of the answer; counted by the chunks if the server sent no usage."""
        if self.output_tokens is not None:
            return self.output_tokens
        return self.first_chunk_tokens + len(self.token_gaps_ms)

    @property
    def computed_tokens(self) -> int | None:
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens

    @property
    def tokens(self) -> dict[str, int]:
        """Prompt tokens by source, without the unknown ones."""
        found = {tier: getattr(self, f"{tier}_tokens") for tier in TIERS}
        return {tier: count for tier, count in found.items() if count is not None}

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "status": "ok" if self.is_ok else "error",
            "ttft_ms": self.ttft_ms,
            "ttft_from_launch_ms": self.ttft_from_launch_ms,
            "end_to_end_ms": self.end_to_end_ms,
            "lateness_ms": self.lateness_ms,
            "tpot_ms": self.tpot_ms,
            "computed_tokens": self.computed_tokens,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RequestRecord:
        """TypeError if a required field is missing or has another type. Derived values are computed again."""
        for name, (types, wanted) in _TYPES.items():
            if name in data and not isinstance(data[name], types):
                raise TypeError(f"`{name}` is {data[name]!r}, not `{wanted}`")
        return cls(**{name: data[name] for name in _TYPES if name in data})


_TYPES = {one.name: (_TYPES_OF_ANNOTATION[str(one.type)], str(one.type)) for one in fields(RequestRecord)}


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier


@dataclass(frozen=True, slots=True)
class Measurement:
    """One arm, once. `facts` is the line of runs.jsonl."""

    run: str
    arm: str
    pair: int
    facts: Mapping[str, Any]
    records: tuple[RequestRecord, ...]

    @property
    def client(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.facts["client"]
        return found

    @property
    def server(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.facts["server"]
        return found


@dataclass(frozen=True, slots=True)
class CellResult:
    """All runs of one cell, and its plan.

    `are_pairs_equal` is false if servers that cannot be emptied got other prompts in every pair. `primary` is the phase
    that the result is about; `all` if no request can reuse anything. `slo` has the limits of a good request, if the
    workload sets some.
    """

    definition: Mapping[str, Any]
    plan: Plan
    digest: str
    runs: tuple[Measurement, ...]
    are_pairs_equal: bool = True
    primary: str = field(init=False)
    slo: Slo | None = field(init=False)

    def __post_init__(self) -> None:
        slo = self.definition["workload"].get("slo")
        object.__setattr__(self, "slo", None if slo is None else Slo.parse(slo))
        phases = {record.phase for run in self.runs for record in run.records}
        primary = next((phase.value for phase in (Phase.STEADY, Phase.FILL) if phase.value in phases), ALL)
        object.__setattr__(self, "primary", primary)

    @property
    def name(self) -> str:
        return str(self.definition["name"])

    @property
    def kind(self) -> str:
        """Of the workload. The file of a `trace` fixes its times."""
        return str(self.definition["workload"]["kind"])

    def of_arm(self, arm: str) -> tuple[Measurement, ...]:
        return tuple(run for run in self.runs if run.arm == arm)

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs))

    def is_primary(self, record: RequestRecord) -> bool:
        return self.primary in (ALL, record.phase)

    def primary_records(self, run: Measurement) -> list[RequestRecord]:
        """Those that were answered."""
        return [record for record in run.records if record.is_ok and self.is_primary(record)]

    def median_ms(self, arm: str) -> float | None:
        """Median of the times to first token of the primary requests of all runs."""
        records = [record for run in self.of_arm(arm) for record in self.primary_records(run)]
        times_ms = [time_ms for record in records if (time_ms := record.ttft_ms) is not None]
        return percentile(times_ms, 50) if times_ms else None

    @property
    def pairs_done(self) -> int:
        return max((run.pair for run in self.runs), default=0)


@dataclass(frozen=True, slots=True)
class Results:
    """`plan` is the content of plan.json, and `cells` are those whose own plan was written. `left_out` has the reasons
    for runs of the plan that were not made."""

    plan: Mapping[str, Any]
    cells: tuple[CellResult, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def arms(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.plan["arms"]
        return found

    @property
    def runs(self) -> list[Measurement]:
        """Those that have ended, in the order of the cells."""
        return [run for cell in self.cells for run in cell.runs]

    @classmethod
    def read(cls, directory: BenchDirectory) -> Results:
        """UsageError for a file that is missing, damaged, or of another format."""
        plan = directory.read_json(PLAN)
        if plan.get("format") != FORMAT:
            raise UsageError(
                f"{directory.path / PLAN}: `format` is {plan.get('format', 'missing')}, this version reads {FORMAT}",
                hint="repeat the measurement with this version of kvbm",
            )
        runs, records = directory.runs(), _records(directory)
        try:
            has_run = {run["cell"] for run in runs}
            planned = [one for one in plan["cells"] if one["name"] in has_run or directory.has(cell_plan(one["name"]))]
            cells = tuple(_cell(directory, one, runs, records) for one in planned)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{directory.path} is damaged: {type(error).__name__}: {error}") from None
        return cls(plan, cells, {line["run"]: line["reason"] for line in directory.lines(LEFT_OUT)})


def _cell(
    directory: BenchDirectory,
    definition: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    records: Mapping[str, Sequence[RequestRecord]],
) -> CellResult:
    name = definition["name"]
    data = directory.read_json(cell_plan(name))
    return CellResult(
        definition,
        Plan.from_json(data),
        data["digest"],
        tuple(
            Measurement(run["run"], run["arm"], run["pair"], run, tuple(records[run["run"]]))
            for run in runs
            if run["cell"] == name
        ),
        are_pairs_equal=not directory.has(cell_plan(name, 2)),
    )


def rounded(value: Any) -> Any:
    """Return the same data with four significant digits below 1, four decimals above, and `None` for infinity."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, DIGITS) if abs(value) >= 1 else float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def sum_if_known(values: Iterable[_Number | None]) -> _Number | None:
    """Return the sum of at least one value, None if a value is unknown or there is none."""
    known = list(values)
    return sum(value for value in known if value is not None) if known and None not in known else None


def tokens_by_source(records: Sequence[RequestRecord]) -> dict[str, int | None]:
    """Return prompt tokens by the usage of the answers; `None` if one does not report them, or there is none."""
    return {tier: sum_if_known(getattr(record, f"{tier}_tokens") for record in records) for tier in TIERS}


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile of at least one value, by linear interpolation between the nearest ranks, numpy's default."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def _records(directory: BenchDirectory) -> dict[str, list[RequestRecord]]:
    """Return the records of every run that has ended, in the order of the plan. UsageError for a damaged line."""
    records: dict[str, list[RequestRecord]] = {run["run"]: [] for run in directory.runs()}
    if not directory.has(REQUESTS):
        directory.note(f"{REQUESTS} is missing: the report has no data of it")
    for number, line in enumerate(directory.lines(REQUESTS), start=1):
        try:
            record = RequestRecord.from_json(line)
        except TypeError as error:
            raise UsageError(f"{directory.path / REQUESTS}, line {number}: {error}") from None
        if record.run in records:
            records[record.run].append(record)
    return {name: sorted(of_run, key=lambda record: record.index) for name, of_run in records.items()}
