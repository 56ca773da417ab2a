"""Bugs in the faithful mode of the LMBenchmark workloads."""

from __future__ import annotations

from mutant import Mutant

FOLDER = "kvbm_cli/bench/lmbenchmark"
TESTS = "tests/bench/test_lmbenchmark"

MUTANTS = (
    Mutant(
        name="lmbenchmark-gap-may-be-reached",
        bug="A user launches when the gap has passed exactly; LMBenchmark waits until it is exceeded.",
        file=f"{FOLDER}/multi_round.py",
        old="not now - self._last_launch_s > self._parameters.gap_s",
        new="not now - self._last_launch_s >= self._parameters.gap_s",
        fails=f"{TESTS}_schedule.py",
    ),
    Mutant(
        name="lmbenchmark-other-float-order",
        bug="The time between users is computed with other float operations, and other virtual users retire at once.",
        file=f"{FOLDER}/presets.py",
        old="return self.session_s / self.users",
        new="return (self.rounds - 1) / self.qps",
        fails=f"{TESTS}_schedule.py",
    ),
    Mutant(
        name="lmbenchmark-keeps-the-failed-question",
        bug="The question of a failed request stays in the history, and two questions follow each other.",
        file=f"{FOLDER}/multi_round.py",
        old="        self._history.pop()\n",
        new="",
        fails=f"{TESTS}_schedule.py",
    ),
    Mutant(
        name="lmbenchmark-users-do-not-pile-up",
        bug="No user joins while the configured number is active, although that is not requested.",
        file=f"{FOLDER}/multi_round.py",
        old="not self._parameters.strict_concurrent_users or ",
        new="",
        fails=f"{TESTS}_schedule.py",
    ),
    Mutant(
        name="lmbenchmark-integers-stay-integers",
        bug="Token counts have no `.0` although a session has no rows.",
        file=f"{FOLDER}/exchange.py",
        old="        rows = [[*map(float, row[:4]), *row[4:]] for row in rows]\n",
        new="        pass\n",
        fails=f"{TESTS}_workload.py",
    ),
    Mutant(
        name="lmbenchmark-failed-requests-in-the-file",
        bug="Failed requests are rows of the CSV file.",
        file=f"{FOLDER}/multi_round.py",
        old="        if request.is_ok:\n",
        new="        if True:\n",
        fails=f"{TESTS}_driver.py -k failed_requests",
    ),
    Mutant(
        name="lmbenchmark-cut-answer-is-complete",
        bug="An answer without its end mark counts as complete.",
        file=f"{FOLDER}/exchange.py",
        old="    if not answer.is_done:\n",
        new="    if failure:\n",
        fails=f"{TESTS}_driver.py -k broken_answers",
    ),
    Mutant(
        name="lmbenchmark-closed-loop",
        bug="The ShareGPT program waits for each answer before the next launch.",
        file=f"{FOLDER}/sharegpt.py",
        old="                tasks.create_task(self._send(transcript, intended_ms))\n",
        new="                await self._send(transcript, intended_ms)\n",
        fails=f"{TESTS}_driver.py -k open_loop",
    ),
    Mutant(
        name="lmbenchmark-agents-take-turns",
        bug="The answers of a round's agents are not awaited before the next round.",
        file=f"{FOLDER}/agentic.py",
        old="        if not is_due or self._in_flight:\n",
        new="        if not is_due:\n",
        fails=f"{TESTS}_driver.py -k agentic",
    ),
    Mutant(
        name="lmbenchmark-warm-up-is-forgotten",
        bug="A user that the warm-up has sent counts as cold.",
        file=f"{FOLDER}/exchange.py",
        old="        self._sessions.add(session)\n        index = -1\n",
        new="        if not is_warm_up:\n            self._sessions.add(session)\n        index = -1\n",
        fails=f"{TESTS}_driver.py -k warm_up_run",
    ),
)
