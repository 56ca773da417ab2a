"""The records of a faithful run: one per request of the main run, failed requests included.

The intended launch is the tick that launches the request: LMBenchmark fixes no launch times before the run.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbm_cli.bench.lmbenchmark.exchange import ProgramRequest
from kvbm_cli.bench.load.request import Target
from kvbm_cli.bench.records.request_record import RequestRecord
from kvbm_cli.bench.workload.script import Phase

OnRecord = Callable[[RequestRecord], None]


class RecordWriter:
    """Numbers the requests of one run, determines their phase, and hands their records over when they end.

    A request is `cold` if its session has sent nothing before. It is `steady` once `session_count` sessions have sent
    something, and `fill` before that. Requests of the warm-up count for the phase, but have no index.
    """

    def __init__(self, target: Target, session_count: int, on_record: OnRecord) -> None:
        self.main: list[RequestRecord] = []
        self.warm_up: list[RequestRecord] = []
        self._target = target
        self._session_count = session_count
        self._on_record = on_record
        self._sessions: set[int] = set()
        self._next_index = 0

    def launched(self, session: int, turn: int, *, is_warm_up: bool = False, has_history: bool = True) -> RequestRecord:
        """Return the record of a request that is sent next. Without history, nothing of its prompt can be reused."""
        phase = Phase.COLD
        if session in self._sessions and has_history:
            phase = Phase.STEADY if len(self._sessions) >= self._session_count else Phase.FILL
        self._sessions.add(session)
        index = -1
        if not is_warm_up:
            index, self._next_index = self._next_index, self._next_index + 1
        target = self._target
        return RequestRecord(target.run, target.arm, target.cell, target.pair, index, session, turn, phase.value)

    def ended(self, request: ProgramRequest) -> None:
        if request.record.index < 0:
            self.warm_up.append(request.record)
            return
        self.main.append(request.record)
        self._on_record(request.record)
