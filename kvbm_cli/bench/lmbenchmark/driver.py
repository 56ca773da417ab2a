"""Runs one parameter set of LMBenchmark against a server, as its scripts do.

`run_faithful` sends the warm-up and the main run, hands each record over when its request ends, and returns the text of
the CSV file. Cancellation ends all requests. The pause between two rates (`presets.PAUSE_AFTER_RUN_S`) is the caller's.
"""

from __future__ import annotations

from kvbm_cli.bench.lmbenchmark.agentic import run_agentic
from kvbm_cli.bench.lmbenchmark.exchange import connect
from kvbm_cli.bench.lmbenchmark.multi_round import run_multi_round
from kvbm_cli.bench.lmbenchmark.presets import FaithfulParameters, LmbenchmarkParameters, ShareGptParameters
from kvbm_cli.bench.lmbenchmark.record_writer import OnRecord
from kvbm_cli.bench.lmbenchmark.result import FaithfulResult
from kvbm_cli.bench.lmbenchmark.sharegpt import run_sharegpt
from kvbm_cli.bench.load.request import Target


async def run_faithful(
    parameters: FaithfulParameters, target: Target, *, model: str, on_record: OnRecord
) -> FaithfulResult:
    """Raise UsageError for unreadable files, EnvironmentProblem if the server answers no request of the warm-up."""
    async with connect(target, model) as server:
        try:
            if isinstance(parameters, LmbenchmarkParameters):
                return await run_multi_round(server, parameters, on_record)
            if isinstance(parameters, ShareGptParameters):
                return await run_sharegpt(server, parameters, on_record)
            return await run_agentic(server, parameters, on_record)
        except ExceptionGroup as failures:  # of the tasks that send requests, for example from `on_record`
            raise failures.exceptions[0] from None
