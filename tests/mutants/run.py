"""Test the tests: each patch in this directory is a plausible bug, and the tests must notice it.

    python tests/mutants/run.py                 all of them
    python tests/mutants/run.py 03 reset        those whose name contains one of these
    python tests/mutants/run.py --list          names, targets and bugs, nothing is run

A patch is a unified diff against the repository (`git apply`) that starts with comment lines: one that says what the
bug is, and one `# fails: <pytest arguments>` that names the tests that must fail. For each patch the working tree, as
git sees it, is copied, patched and tested in a directory of its own. Before that, every target must pass without any
patch. Exit code 1 when a bug survives, a patch does not apply, or a target fails without one.
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

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
TIMEOUT_S = 180
TESTS_FAILED = 1  # pytest's exit code; the others mean that it could not run them


@dataclass(frozen=True)
class Mutant:
    """One patch: what is wrong with it, and the pytest arguments that must notice."""

    path: Path
    bug: str
    target: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    verdict: str
    is_good: bool
    seconds: float
    output: str = ""


def read_mutant(path: Path) -> Mutant:
    comments = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        comments.append(line.lstrip("# ").strip())
    targets = [line.removeprefix("fails:").strip() for line in comments if line.startswith("fails:")]
    bug = " ".join(line for line in comments if line and not line.startswith("fails:"))
    if len(targets) != 1 or not bug:
        raise SystemExit(
            f"error: {path.name} must start with a comment on the bug and one `# fails: <pytest arguments>`"
        )
    return Mutant(path, bug, tuple(shlex.split(targets[0])))


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


def run_tests(tree: Path, target: tuple[str, ...]) -> tuple[int | None, str]:
    """Return pytest's exit code, None when it did not end in time, and what it printed."""
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S // 2}", "--hypothesis-seed=0"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        result = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *target],
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


def judge_clean(files: list[str], target: tuple[str, ...]) -> Outcome:
    started = time.monotonic()
    with copied_tree(files) as tree:
        code, output = run_tests(tree, target)
    seconds = time.monotonic() - started
    return (
        Outcome("passes", True, seconds) if code == 0 else Outcome(f"FAILS UNPATCHED ({code})", False, seconds, output)
    )


def judge(files: list[str], mutant: Mutant) -> Outcome:
    started = time.monotonic()
    with copied_tree(files) as tree:
        applied = subprocess.run(["git", "apply", mutant.path], cwd=tree, capture_output=True, text=True)
        if applied.returncode:
            return Outcome("DOES NOT APPLY", False, time.monotonic() - started, applied.stderr)
        code, output = run_tests(tree, mutant.target)
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
    parser.add_argument("names", nargs="*", help="run only the patches whose name contains one of these")
    parser.add_argument("--list", action="store_true", help="print the patches and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="how many to run at once (default 1)")
    options = parser.parse_args()
    paths = sorted(
        path for path in HERE.glob("*.patch") if not options.names or any(n in path.name for n in options.names)
    )
    mutants = [read_mutant(path) for path in paths]
    if not mutants:
        print("error: no patch has such a name", file=sys.stderr)
        return 1
    if options.list:
        for mutant in mutants:
            print(f"{mutant.path.stem:<36} {' '.join(mutant.target):<32} {mutant.bug}")
        return 0
    files = tracked_files()
    with ThreadPoolExecutor(options.jobs) as pool:
        targets = sorted({mutant.target for mutant in mutants})
        clean = list(pool.map(lambda target: judge_clean(files, target), targets))
        for target, outcome in zip(targets, clean, strict=True):
            report("(no patch)", outcome, " ".join(target))
        outcomes = []
        for mutant, outcome in zip(mutants, pool.map(lambda mutant: judge(files, mutant), mutants), strict=True):
            report(mutant.path.stem, outcome, mutant.bug)
            outcomes.append(outcome)
    caught = sum(outcome.is_good for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} bugs caught")
    return 0 if all(outcome.is_good for outcome in (*clean, *outcomes)) else 1


if __name__ == "__main__":
    sys.exit(main())
