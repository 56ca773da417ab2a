"""Sessions: places each line of a trace into its session, and estimates when its request is launched.

A line without `session_id` is a session of its own. The launch of a later turn is estimated as if answers took no time:
the later one of its `timestamp` and of the previous launch plus `delay`. The estimate only orders requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from kvbm.errors import ProfileError
from kvbm_cli.bench.trace.trace_request import TraceFormat, TraceRequest, Turns


@dataclass(frozen=True, slots=True)
class Placement:
    """`session` counts from 0, `turn` from 1, `index` is the position in the file, `previous` that of the previous
    turn. `launch_ms` is None in a trace without timestamps, which is a closed loop."""

    index: int
    session: int
    turn: int
    previous: int | None
    launch_ms: float | None


@dataclass(frozen=True, slots=True)
class _Session:
    first_line: int
    input_kind: str
    first_hash_id: int | None
    latest: Placement


class Sessions:
    """Call `place` once per request, in the order of the file. ProfileError for a line that contradicts another."""

    def __init__(self, path: Path, form: TraceFormat) -> None:
        self._path = path
        self._form = form
        self._by_id: dict[str, _Session] = {}
        self._first: TraceRequest | None = None
        self.request_count = 0
        self.session_count = 0

    def place(self, request: TraceRequest) -> Placement:
        session = None if request.session_id is None else self._by_id.get(request.session_id)
        placed = self._first_turn(request) if session is None else self._later_turn(request, session)
        self.request_count += 1
        if session is None:
            self.session_count += 1
        if request.session_id is not None:
            if session is None:
                first_hash_id = request.hash_ids[0] if request.hash_ids else None
                session = _Session(request.line, request.input_kind, first_hash_id, placed)
            self._by_id[request.session_id] = replace(session, latest=placed)
        return placed

    def repeats_answers(self, request: TraceRequest) -> bool:
        """Whether the prompt of a later turn holds the answer to this request."""
        is_added = self._form.turns is Turns.ADDED and request.messages is None and request.payload is None
        return is_added and request.session_id is not None

    def _first_turn(self, request: TraceRequest) -> Placement:
        if self._first is None:
            self._first = request
        if (request.timestamp_ms is None) != (self._first.timestamp_ms is None):
            name, first = self._form.name("timestamp"), self._first.line
            has, lacks = ("", "no ") if request.timestamp_ms is not None else ("no ", "")
            self._refuse(
                request,
                f"the first turn of a session has {has}`{name}` here, and {lacks or 'a '}`{name}` in line {first}",
                hint="give either all sessions a timestamp, or none",
            )
        if request.delay_ms:
            name = self._form.name("delay")
            self._refuse(
                request,
                f"`{name}` is {request.delay_ms:g} ms in the first turn of a session, which follows no other turn",
                hint=f"`{self._form.name('session_id')}` joins the turns of a session",
            )
        return Placement(self.request_count, self.session_count, 1, None, request.timestamp_ms)

    def _later_turn(self, request: TraceRequest, session: _Session) -> Placement:
        previous = session.latest
        if request.input_kind != session.input_kind:
            one, another = self._form.name(request.input_kind), self._form.name(session.input_kind)
            self._refuse(request, f"the session has `{one}` here, and `{another}` in line {session.first_line}")
        self._require_added(request, session, previous.turn + 1)
        if previous.launch_ms is None and request.timestamp_ms is not None:
            name = self._form.name("timestamp")
            self._refuse(request, f"the session has `{name}` here, and none in line {session.first_line}")
        launch_ms = previous.launch_ms
        if launch_ms is not None:
            timestamp_ms = launch_ms if request.timestamp_ms is None else request.timestamp_ms
            self._require_order(request, timestamp_ms, launch_ms)
            launch_ms = max(timestamp_ms, launch_ms + (request.delay_ms or 0.0))
        return Placement(self.request_count, previous.session, previous.turn + 1, previous.index, launch_ms)

    def _require_order(self, request: TraceRequest, timestamp_ms: float, previous_ms: float) -> None:
        if timestamp_ms < previous_ms:
            name = self._form.name("timestamp")
            self._refuse(
                request,
                f"`{name}` is {timestamp_ms:g} ms, and the previous turn of the session is launched at "
                f"{previous_ms:g} ms",
                hint="the turns of a session must be in the order of their launches",
            )

    def _require_added(self, request: TraceRequest, session: _Session, turn: int) -> None:
        """Refuse lines that hold whole prompts. The first block of the session in a later turn shows that the lines
        hold whole prompts."""
        if self._form.turns is Turns.ADDED and request.hash_ids and request.hash_ids[0] == session.first_hash_id:
            self._refuse(
                request,
                f"turn {turn} of the session begins with block {session.first_hash_id}, as line {session.first_line} "
                "does, so it seems to hold the whole prompt instead of what the turn adds",
                hint="add `--turns whole` if each line holds the whole prompt",
            )

    def _refuse(self, request: TraceRequest, message: str, *, hint: str | None = None) -> NoReturn:
        raise ProfileError(f"{self._path}:{request.line}: {message}", hint=hint)
