"""Runs in the environment of LMBenchmark: drives its classes with the simulated clock, without a server.

`python lmbenchmark_oracle.py CHECKOUT < cases.json` prints, per case, the launches and the CSV file as JSON.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from lmbenchmark_clock import START_S, simulate


def load(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("program", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(program: ModuleType, case: dict[str, Any]) -> dict[str, Any]:
    launched: list[tuple[int, str]] = []
    callbacks = {}

    class Executor:
        def launch_request(self, history: Any, max_tokens: int, callback: Any, extra_headers: dict[str, str]) -> None:
            user = int(extra_headers["x-user-id"])
            launched.append((user, history.get_messages_for_openai()[-1]["content"]))
            callbacks[user] = callback

    def step(now: float) -> list[tuple[int, str]]:
        launched.clear()
        manager.step(now, Executor())
        return list(launched)

    def answered(user: int, now: float, text: str) -> None:
        rows[user] = rows.get(user, 0) + 1
        times = (0, 0) if case["has_no_text"] else (now - START_S, 0.25)
        callbacks[user](program.Response(text, *times, 100 * user, rows[user], now - 1.0, now))

    rows: dict[int, int] = {}
    sizes = case["parameters"]
    manager = program.UserSessionManager(
        program.WorkloadConfig(
            num_users=sizes["users"],
            system_prompt_len=sizes["system_words"],
            user_info_len=sizes["history_words"],
            answer_len=1,
            num_rounds=sizes["rounds"],
            qps=sizes["qps"],
            model="m",
            enable_user_id=False,
            enforce_strict_concurrent_users=sizes["strict_concurrent_users"],
        ),
        init_user_id=sizes["first_user_id"],
    )
    launches = simulate(step, answered, **case["clock"])
    with contextlib.redirect_stdout(sys.stderr):
        table = manager.summary(0, START_S + 10_000.0)
    return {"launches": launches, "csv": table.to_csv(index=False)}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    loaded = load(Path(sys.argv[1]) / "synthetic-multi-round-qa" / "multi-round-qa.py")
    json.dump([run(loaded, case) for case in json.load(sys.stdin)], sys.stdout)
