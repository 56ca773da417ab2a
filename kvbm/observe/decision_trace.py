"""A recording of what a leader was asked and what it decided, as JSON lines, to look into afterwards.

    {"at_s": 12.3, "call": "match", "request": "r1", "start": 0, "hashes": ["…"], "blocks": 4}

It names blocks by their hashes and holds no prompt. `RecordingLeader` only puts references into a bounded queue; a
thread of the `Recorder` makes the text and writes it. What the queue has no room for is dropped, counted and said, in
the file too: a step never waits for a recording, and a file that cannot be written costs the recording only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.errors import EnvironmentProblem
from kvbm.leader.leader import Leader, LoadResult

if TYPE_CHECKING:
    from kvbm.plan import StepPlan

QUEUE_CALLS = 2048
MAX_BYTES = 1 << 30
CLOSE_S = 2.0
FORMAT = 1

log = logging.getLogger(__name__)

_Call = tuple[float, str, Mapping[str, object]]


class Recorder:
    """One private file, and the thread that writes it. `note` may be called by one thread; EnvironmentProblem where the
    file cannot be made."""

    def __init__(self, directory: Path, *, queue_calls: int = QUEUE_CALLS, max_bytes: int = MAX_BYTES) -> None:
        self.path, self._fd = _create(directory)
        self.dropped_calls = 0
        self._max_bytes = max_bytes
        self._written_bytes = 0
        self._told_drops = 0
        self._is_broken = False
        self._calls: queue.Queue[_Call | None] = queue.Queue(queue_calls)
        self._thread = threading.Thread(target=self._run, name="kvbm-record", daemon=True)
        self._thread.start()
        log.info("kvbm: decisions are recorded in %s", self.path)

    def note(self, call: str, **values: object) -> None:
        """Takes the call, or drops it where there is no room. Nobody else puts anything into the queue."""
        if not self._is_broken and not self._calls.full():
            self._calls.put_nowait((time.time(), call, values))
            return
        if not self.dropped_calls and not self._is_broken:
            log.warning("kvbm: more is decided than %s takes; what is dropped is counted", self.path)
        self.dropped_calls += 1

    def close(self) -> None:
        """Writes what is left, as far as it takes no longer than CLOSE_S."""
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):  # then the thread is left to its file
            self._calls.put(None, timeout=CLOSE_S)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self.dropped_calls:
            log.warning("kvbm: %d calls are not in %s", self.dropped_calls, self.path)

    def _run(self) -> None:
        self._write({"at_s": time.time(), "call": "begin", "format": FORMAT, **_versions()})
        while (taken := self._calls.get()) is not None:
            at_s, call, values = taken
            self._write({"at_s": at_s, "call": call, **values})
            if self.dropped_calls != self._told_drops:
                self._told_drops = self.dropped_calls
                self._write({"at_s": time.time(), "call": "dropped", "calls": self._told_drops})
        self._write({"at_s": time.time(), "call": "end", "dropped": self.dropped_calls})
        os.close(self._fd)

    def _write(self, values: Mapping[str, object]) -> None:
        if self._is_broken:
            return
        line = json.dumps(values, default=_plain, separators=(",", ":")).encode() + b"\n"
        try:
            if self._written_bytes + len(line) > self._max_bytes:
                raise OSError(f"it has reached {self._max_bytes} bytes")
            while line:
                count = os.write(self._fd, line)
                self._written_bytes, line = self._written_bytes + count, line[count:]
        except OSError as error:
            self._is_broken = True
            log.warning("kvbm: the recording %s has ended: %s", self.path, error.strerror or error)


class RecordingLeader(Leader):
    """A leader whose every decision is noted. It decides nothing else than a leader does."""

    def __init__(self, recorder: Recorder, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._recorder = recorder

    def match(self, request_id: str, hashes: Sequence[bytes], start: int) -> int | None:
        blocks = super().match(request_id, hashes, start)
        self._note("match", request=request_id, start=start, hashes=hashes[start:], blocks=blocks)
        return blocks

    def match_groups(self, request_id: str, chains: Sequence[Sequence[bytes]], start: int, end: int) -> int | None:
        tokens = super().match_groups(request_id, chains, start, end)
        self._note("match", request=request_id, start_tokens=start, end_tokens=end, tokens=tokens)
        return tokens

    def onboard(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        start: int,
        block_ids: Sequence[int],
        *,
        tokens: int | None = None,
    ) -> None:
        super().onboard(request_id, hashes, start, block_ids, tokens=tokens)
        wanted = hashes[start : start + len(block_ids)]
        self._note("onboard", request=request_id, start=start, hashes=wanted, device_blocks=tuple(block_ids))

    def offload(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        computed_blocks: int,
        prompt_blocks: int,
        group: int = 0,
        priorities: Sequence[int] | None = None,
    ) -> int:
        begin = self._live(request_id).offloads[group].considered
        considered = super().offload(
            request_id,
            hashes,
            block_ids,
            computed_blocks=computed_blocks,
            prompt_blocks=prompt_blocks,
            group=group,
            priorities=priorities,
        )
        if considered > begin:
            fresh = hashes[begin:considered]
            self._note("offload", request=request_id, group=group, start=begin, hashes=fresh)
        return considered

    def step(self) -> StepPlan:
        plan = super().step()
        if not plan.is_empty():
            orders = [(one.generation, one.block_ids, one.slots) for one in plan.offloads]
            loads = [(one.generation, one.block_ids, one.slots) for one in plan.onboards]
            overdue = len(plan.overdue_offloads) + len(plan.overdue_onboards)
            self._note("step", step=plan.step, offloads=orders, onboards=loads, overdue=overdue)
        return plan

    def settle(self) -> list[LoadResult]:
        results = super().settle()
        for one in results:
            self._note("loaded", request=one.request_id, blocks=len(one.block_ids), failed=len(one.failed_block_ids))
        return results

    def finish(self, request_id: str, *chains: Sequence[bytes]) -> None:
        super().finish(request_id, *chains)
        self._note("finish", request=request_id)

    def reset(self) -> bool:
        is_forgotten = super().reset()
        self._note("reset", is_forgotten=is_forgotten)
        return is_forgotten

    def _note(self, call: str, **values: object) -> None:
        self._recorder.note(call, **values)
        self.counters.record_dropped_calls = self._recorder.dropped_calls


def _create(directory: Path) -> tuple[Path, int]:
    """A file of its own, which nobody else may read, and its descriptor."""
    prefix = f"records-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-"
    try:
        directory = directory.expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=prefix, suffix=".jsonl", dir=directory)
        return Path(name), fd
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise EnvironmentProblem(
            f"cannot record in {directory}: {reason}",
            hint="`metrics.record_directory` names another directory, `metrics.record: false` "
            "(`DYN_KVBM_ENABLE_RECORD=0`) records nothing",
        ) from None


def _versions() -> dict[str, object]:
    try:
        version = metadata.version("kvbm-cli")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return {"kvbm": version, "pid": os.getpid()}


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes | bytearray | memoryview) else str(value)
