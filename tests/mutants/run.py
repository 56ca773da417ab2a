"""Test the tests: each row of the tables in this directory is a plausible bug, and the tests must notice it.

    python tests/mutants/run.py                 all of them
    python tests/mutants/run.py leader reset    those whose name contains one of these
    python tests/mutants/run.py --list          names, targets and bugs, nothing is run
    python tests/mutants/run.py --check         whether every row still fits the code, nothing is run

A row (`mutant.py`) names a file, a text that occurs in it exactly once, the text that replaces it, and the tests that
must fail then. For each row the working tree, as git sees it, is copied, changed and tested in a directory of its own.
Before that, every target must pass without any change. Exit code 1 when a bug survives, a row does not fit the code, or
a target fails without one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import bench_analysis
import bench_files
import bench_reasons
import bench_spine
import bench_trace
import cli
import core
import cuda
import device
import disk
import disk_tier
import hicache
import identity
import leader
import media
import observe
import onboards
import replicas
import shared
import shared_tier
import sizing
import states
import text
import trtllm
import worker
from mutant import Mutant

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CACHE = (
    core,
    leader,
    states,
    onboards,
    disk,
    disk_tier,
    shared,
    shared_tier,
    identity,
    device,
    cuda,
    worker,
    replicas,
    media,
    observe,
    trtllm,
    hicache,
)
BENCH = (bench_analysis, bench_files, bench_reasons, bench_spine, bench_trace)
TABLES = (*CACHE, sizing, cli, text, *BENCH)
TIMEOUT_S = 180
TESTS_FAILED = 1  # pytest's exit code; the others mean that it could not run them


@dataclass(frozen=True)
class Outcome:
    verdict: str
    is_good: bool
    seconds: float
    output: str = ""


def mistakes(mutants: list[Mutant]) -> list[str]:
    """Return what is wrong with the rows, one line each."""
    found = []
    names = [mutant.name for mutant in mutants]
    for mutant in mutants:
        problems = ["another row has this name"] if names.count(mutant.name) > 1 else []
        if mutant.old == mutant.new:
            problems.append("the old and the new text are the same")
        try:
            mutant.applied_to((REPOSITORY / mutant.file).read_text())
        except (OSError, ValueError) as error:
            problems.append(str(error))
        paths = [argument for argument in shlex.split(mutant.fails) if argument.startswith("tests/")]
        problems += [f"{path} does not exist" for path in paths if not (REPOSITORY / path.split("::")[0]).exists()]
        if not paths:
            problems.append("no tests are named")
        found += [f"{mutant.name}: {problem}" for problem in problems]
    return found


def tracked_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (REPOSITORY / name).is_file()]


@contextmanager
def copied_tree(files: list[str]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvbm-mutant-") as directory:
        tree = Path(directory)
        for name in files:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, tree / name)
        yield tree


def run_tests(tree: Path, target: str) -> tuple[int | None, str]:
    """Return pytest's exit code, None when it did not end in time, and what it printed."""
    scope = ["-n", "0", "-m", "not soak and not servers"]  # in one process, the slow tests too
    options = [*scope, "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S // 2}", "--hypothesis-seed=0"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        result = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *shlex.split(target)],
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as expired:
        return None, str(expired.output)
    return result.returncode, result.stdout


def judge_clean(files: list[str], target: str) -> Outcome:
    started = time.monotonic()
    with copied_tree(files) as tree:
        code, output = run_tests(tree, target)
    seconds = time.monotonic() - started
    return (
        Outcome("passes", True, seconds) if code == 0 else Outcome(f"FAILS UNCHANGED ({code})", False, seconds, output)
    )


def judge(files: list[str], mutant: Mutant) -> Outcome:
    started = time.monotonic()
    with copied_tree(files) as tree:
        path = tree / mutant.file
        try:
            path.write_text(mutant.applied_to(path.read_text()))
        except (OSError, ValueError) as error:
            return Outcome("DOES NOT APPLY", False, time.monotonic() - started, str(error))
        code, output = run_tests(tree, mutant.fails)
    seconds = time.monotonic() - started
    if code is None:
        return Outcome("caught (hung)", True, seconds)
    if code == TESTS_FAILED:
        return Outcome("caught", True, seconds)
    return Outcome("SURVIVED" if code == 0 else f"TESTS DID NOT RUN ({code})", False, seconds, output)


def report(name: str, outcome: Outcome, detail: str) -> None:
    print(f"{outcome.verdict:<24}{outcome.seconds:6.1f} s  {name:<36} {detail}", flush=True)
    if outcome.output:
        print("".join(f"    | {line}\n" for line in outcome.output.splitlines()[-25:]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Apply each planted bug and require a test to fail.")
    parser.add_argument("names", nargs="*", help="run only the bugs whose name contains one of these")
    parser.add_argument("--list", action="store_true", help="print the bugs and run nothing")
    parser.add_argument("--check", action="store_true", help="check all rows against the code and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="how many to run at once (default 1)")
    options = parser.parse_args()
    every = [mutant for table in TABLES for mutant in table.MUTANTS]
    if options.check:
        found = mistakes(every)
        for mistake in found:
            print(f"error: {mistake}", file=sys.stderr)
        return 1 if found else 0
    mutants = [m for m in every if not options.names or any(name in m.name for name in options.names)]
    if not mutants:
        print("error: no bug has such a name", file=sys.stderr)
        return 1
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:<36} {mutant.fails:<32} {mutant.bug}")
        return 0
    files = tracked_files()
    with ThreadPoolExecutor(options.jobs) as pool:
        targets = sorted({mutant.fails for mutant in mutants})
        clean = list(pool.map(lambda target: judge_clean(files, target), targets))
        for target, outcome in zip(targets, clean, strict=True):
            report("(no bug)", outcome, target)
        outcomes = []
        for mutant, outcome in zip(mutants, pool.map(lambda mutant: judge(files, mutant), mutants), strict=True):
            report(mutant.name, outcome, mutant.bug)
            outcomes.append(outcome)
    caught = sum(outcome.is_good for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} bugs caught")
    return 0 if all(outcome.is_good for outcome in (*clean, *outcomes)) else 1


if __name__ == "__main__":
    sys.exit(main())
