"""Mistakes that users make: the command, the files, the variables and the machine that each is made with.

`test_mistakes.py` makes every one of them and compares what is said, word for word. A row of its own is worth a mistake
that is answered by words of its own.

Most are only an entry in `snapshots/mistakes/commands/`, as a terminal shows it: `$ cat mine.yaml` and the contents for
each file, then the variables and the command. To add one, write these lines below a name, and let
`KVBM_UPDATE_SNAPSHOTS=1` write what is said. The rows of this module need more: files that a text cannot hold or show,
links, ports, engines. Their entry is in `snapshots/mistakes/<area>.txt`.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from terminal import SNAPSHOTS, steps_of, stored_entries, words_of

COMMANDS = "commands"
WRONG = 2  # the profile, an override, a variable or the command line
MACHINE = 1  # the machine lacks something

MINE = """\
engine:
  model: synthetic:tiny
tiers:
  host:
    capacity: 256MiB
"""
VLLM = """\
engine:
  kind: vllm
  model: synthetic:vllm-25m
tiers:
  host:
    capacity: 256MiB
"""


def no_preparation(home: Path) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Row:
    """`command` is what stands behind `kvbm`; `files` lie in the working directory, which is the home too."""

    command: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    exit_code: int = WRONG
    prepare: Callable[[Path], AbstractContextManager[None]] = no_preparation

    def line(self, area: str) -> str:
        """What a shell gets. Files and variables are shown where nothing else says them."""
        if not area.startswith(COMMANDS):
            return f"kvbm {self.command}"
        shown = "".join(f"cat {shlex.quote(name)}\n{contents}$ " for name, contents in self.files.items())
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.variables.items())
        return f"{shown}{variables}kvbm {self.command}"

    def encoded(self, encoding: str) -> Row:
        """The same with the files in another encoding."""
        files = {name: text.encode(encoding) for name, text in self.files.items() if isinstance(text, str)}
        return replace(self, files=files)


def mine(added: str, *, base: str = MINE, command: str = "profile check mine.yaml", **rest: object) -> Row:
    """A profile with lines that are wrong."""
    return Row(command, {"mine.yaml": base + added}, **rest)  # type: ignore[arg-type]


def linked(*links: tuple[str, str]) -> Callable[[Path], AbstractContextManager[None]]:
    """Symbolic links in the working directory: name and target."""

    @contextmanager
    def prepared(home: Path) -> Iterator[None]:
        for name, target in links:
            (home / name).symlink_to(target)
        try:
            yield
        finally:
            for name, _ in links:
                (home / name).unlink()

    return prepared


LOOP = linked(("loop.yaml", "loop.yaml"), ("loop", "loop"))


@contextmanager
def fifo(home: Path) -> Iterator[None]:
    """A FIFO that no process writes."""
    os.mkfifo(home / "pipe.yaml")
    try:
        yield
    finally:
        (home / "pipe.yaml").unlink()


@contextmanager
def for_everyone(home: Path) -> Iterator[None]:
    (home / "all").mkdir()
    (home / "all").chmod(0o777)
    try:
        yield
    finally:
        (home / "all").rmdir()


@contextmanager
def taken_port(home: Path) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 18734)):
        yield


HERE, ELSEWHERE = True, False


def runs(*named: tuple[str, bool], **changes: object) -> Callable[[Path], AbstractContextManager[None]]:
    """Runs that live, in this process, or in one that only its lock shows: another machine with the same home."""

    @contextmanager
    def prepared(home: Path) -> Iterator[None]:
        from recorded_runs import NOBODY, facts

        from kvbm_cli.runs.run_directory import Runs

        directory = home / ".local/state/kvbm"
        (directory / "runs").mkdir(parents=True, exist_ok=True)
        made = []
        for profile, is_here in named:
            run = Runs(directory).create(profile)
            run.begin(facts(run.name, None if is_here else NOBODY, **changes))
            made.append(run)
        try:
            yield
        finally:
            for run in made:
                run.remove()
            for name in (".local/state/kvbm/runs", ".local/state/kvbm", ".local/state", ".local"):
                (home / name).rmdir()

    return prepared


PROFILE = {
    "profile_empty": mine("", base=""),
    "profile_not_text_in_one_line": mine("", base=MINE + "description: caf\u00e9\n").encoded("latin-1"),
    "profile_utf_16": mine("").encoded("utf-16"),
    "profile_with_a_nul": mine("description: a\0b\n"),
    "profile_too_large": mine("# a comment\n" * 20_000),
    "profile_is_a_loop": Row("profile check loop.yaml", prepare=LOOP),
    "profile_is_a_fifo": Row("profile check pipe.yaml", prepare=fifo),
    "profile_model_is_a_loop": mine("", base=MINE.replace("synthetic:tiny", "./loop"), prepare=LOOP),
    "profile_workload_is_a_loop": mine("bench: {workload: ./loop.yaml}\n", prepare=LOOP),
    "profile_tab": mine("\tport: 1\n"),
    "profile_tab_after_a_colon": mine("server:\n  port:\t1\n"),
    "profile_no_break_space_after_a_colon": mine("server:\n  host:\u00a0localhost\n  port: 1\n"),
    "profile_no_break_spaces_in_the_indentation": mine("server:\n\u00a0 port: 1\n\u00a0 host: a\n"),
    "profile_no_break_space_at_the_end": mine("server: {prt: 1}\n", base=MINE.replace("256MiB", "256MiB\u00a0")),
    "profile_zero_width_space_in_a_key": mine("server: {po\u200brt: 1}\n"),
    "profile_byte_order_mark_in_the_middle": mine("\ufeffserver: {port: 1}\n"),
    "profile_line_separator": mine("server: {port: 1}\u2028metrics: {prt: 1}\n"),
    "profile_typographic_quotes": mine("", base=MINE.replace("256MiB", "\u201c256MiB\u201d")),
    "profile_typographic_quotes_around_a_colon": mine("server: {host: \u201ca: b\u201d}\nmetrics: {prt: 1}\n"),
    "extends_a_fifo": mine("", base="extends: ./pipe.yaml\n", prepare=fifo),
    "extends_a_loop": mine("", base="extends: ./loop.yaml\n", prepare=LOOP),
}

FILES = {
    "import_of_text_in_another_encoding": Row("profile import a.sh", {"a.sh": b"vllm serve caf\xe9\n"}),
    "import_of_a_large_file": Row("profile import a.sh", {"a.sh": "# a line\n" * 40_000}),
    "trace_parquet": Row("bench trace t.parquet", {"t.parquet": b"PAR1\x15\x04"}),
    "trace_of_one_long_list_as_a_workload": Row(
        "bench --profile demo --workload chats.json",
        {"chats.json": '[{"conversations": []}' + " " * (1 << 17) + "]"},
    ),
}

DEMO = "serve --profile demo --port 0"
LONG_PATH = f"/{'d' * 200}" * 17
MACHINE_STATE = {
    "machine_directory_below_a_loop": mine("  disk: {capacity: 1GiB, directory: ~/loop/a}\n", prepare=LOOP),
    "machine_directory_with_a_long_path": mine(f"  disk: {{capacity: 1GiB, directory: {LONG_PATH}}}\n"),
    "machine_directory_for_everyone": mine("  disk: {capacity: 1GiB, directory: ~/all}\n", prepare=for_everyone),
    "machine_port_taken": mine(
        "", command="serve --profile mine.yaml --port 18734", exit_code=MACHINE, prepare=taken_port
    ),
    "machine_port_of_the_profile_taken": mine(
        "server:\n  port: 18734\n", command="serve --profile mine.yaml", exit_code=MACHINE, prepare=taken_port
    ),
    "override_with_a_zero_width_space": Row("profile check demo --set tiers.host.capacity=1GiB\u200b"),
    "variable_with_export": Row("profile check demo", variables={"export DYN_KVBM_CPU_CACHE_GB": "4"}),
    "variable_port_of_metrics_taken": Row(
        DEMO,
        variables={"DYN_KVBM_METRICS": "1", "DYN_KVBM_METRICS_PORT": "18734"},
        exit_code=MACHINE,
        prepare=taken_port,
    ),
}

SERVING = {
    "serve_port_of_a_starting_engine": Row(
        "serve --profile demo", exit_code=MACHINE, prepare=runs(("other", HERE), state="starting")
    ),
    "serve_without_memory_beside_others": Row(
        DEMO, exit_code=MACHINE, prepare=runs(("other", HERE), state="starting", memory_bytes=1 << 50)
    ),
    "serve_log_is_a_loop": Row(f"{DEMO} --log loop", exit_code=MACHINE, prepare=LOOP),
    "serve_log_is_a_fifo": Row(f"{DEMO} --log pipe.yaml", exit_code=MACHINE, prepare=fifo),
    "stop_a_misspelt_run": Row("stop dmo-1", prepare=runs(("demo", HERE))),
    "stop_one_of_two": Row("stop demo", prepare=runs(("demo", HERE), ("demo", HERE))),
    "stop_on_another_machine": Row("stop", exit_code=MACHINE, prepare=runs(("demo", ELSEWHERE))),
    "logs_of_two": Row("logs --follow", prepare=runs(("demo", HERE), ("other", HERE))),
    "logs_that_are_gone": Row("logs demo", exit_code=MACHINE, prepare=runs(("demo", HERE), state="ended")),
}

AREAS = {"serve": SERVING, "profile": PROFILE, "file": FILES, "machine": MACHINE_STATE}


def commands_in(file: str) -> dict[str, Row]:
    """The rows of a file of transcripts with one command each."""
    rows = {}
    for name, text in stored_entries(file).items():
        *files, (line, result) = steps_of(text)
        variables, _ = words_of(line)
        exit_code = int(result.partition("\n")[0].removeprefix("exit code: ") or WRONG)
        contents = {shlex.split(shown)[1]: content for shown, content in files}
        rows[name] = Row(line.partition("kvbm ")[2], contents, variables, exit_code)
    return rows


for file in sorted((SNAPSHOTS / "mistakes" / COMMANDS).iterdir()):
    AREAS[f"{COMMANDS}/{file.stem}"] = commands_in(f"mistakes/{COMMANDS}/{file.stem}")
ROWS = {name: row for rows in AREAS.values() for name, row in rows.items()}
AREA_OF = {name: area for area, rows in AREAS.items() for name in rows}


def make_files(row: Row, home: Path) -> None:
    for name, contents in row.files.items():
        (home / name).write_bytes(contents if isinstance(contents, bytes) else contents.encode())


LOCK = (".local", "state", "kvbm", "runs", "lock")  # is empty, and lies there from the first start on


def what_lies_in(home: Path) -> dict[str, bytes | None]:
    """Every file with its contents, and every directory, but for the lock of the run directories."""
    expected = {str(home.joinpath(*LOCK[:depth])) for depth in range(1, len(LOCK) + 1)}
    found: dict[str, bytes | None] = {}
    for directory, directories, files in os.walk(home):
        found |= {os.path.join(directory, name): None for name in directories}
        found |= {os.path.join(directory, name): Path(directory, name).read_bytes() for name in files}
    return {path: contents for path, contents in found.items() if path not in expected or contents}
