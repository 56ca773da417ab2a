"""The command as a user sees it: its exit code and both streams, compared with a stored text.

`kvbm` starts the real program, `kvbm_here` runs the command in this process. A stored text is a file of its own, or an
entry of a file: a line `=== name`, then the text. `KVBM_UPDATE_SNAPSHOTS=1 pytest tests/cli tests/bench tests/doctor`
writes the stored texts anew; the difference is then reviewed as code.

A transcript is an entry that says what to do, too: lines `$ ...` with a command of kvbm or of the shell, each followed
by what it shows.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import shlex
import subprocess
import sys
import termios
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from kvbm_cli.app import run

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOTS = Path(__file__).parent / "cli" / "snapshots"
# Like the installed program, it imports nothing from the current directory.
PROGRAM = (sys.executable, "-P", "-c", "from kvbm_cli.app import main; main()")
HANGS_S = 240  # of a program that hangs; a busy machine takes a quarter of it for a start and a stop
FAKE_ENGINE = Path(__file__).parent / "cli" / "fake_engine.py"

# What differs between machines and runs, in the order in which it is replaced.
FILTERS = (
    (re.escape(sys.executable), "[PYTHON]"),  # before ROOT, below which it may lie
    (re.escape(str(ROOT)), "[ROOT]"),
    (re.escape(version("kvbm-cli")), "[VERSION]"),
    (r"( has only )[\d.]+ \w+( free)", r"\1[FREE]\2"),
    (r"(set `tiers\.host\.capacity: )\d+\w+(` or less)", r"\1[FIT]\2"),
    (r"only [\d.]+ \w+ are available \([^)]*\)", "only [FREE] are available ([LIMIT])"),
    (r"(kvbm/models/[\w-]+-)[0-9a-f]{12}\b", r"\1[DIGEST]"),
    (r"\(starting, pid \d+\)", "(starting, pid [PID])"),
    (r"(127\.0\.0\.1[: ](?:port )?)\d{5}\b", r"\1[PORT]"),
    (r"(--port )\d{5}( --extra_llm_api_options)", r"\1[PORT]\2"),
    (r"\b\d+\.\d s\b", "[TIME] s"),
    (r"\bfor \d+ s\b", "for [TIME] s"),
    (r"\b(process|\"pid\":) \d+", r"\1 [PID]"),
    (r"/tmp/\S*?pytest-\d+/(?:popen-gw\d+/)?[^/\s]+", "[TMP]"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str

    def text(self, command: str) -> str:
        shown = f"$ {command}\nexit code: {self.exit_code}\n----- stdout -----\n{self.stdout}"
        return filtered(f"{shown}----- stderr -----\n{self.stderr}")


def filtered(text: str) -> str:
    for pattern, placeholder in FILTERS:
        text = re.sub(pattern, placeholder, text)
    return text


def environment(home: Path, **extra: str) -> dict[str, str]:
    """A small environment of its own: no variable of the developer's shell reaches the program."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH", "VIRTUAL_ENV") if name in os.environ}
    return {**kept, "HOME": str(home), "COLUMNS": "80", "OMP_NUM_THREADS": "1", **extra}


def kvbm(*arguments: str, home: Path, timeout_s: float = HANGS_S, stdin: str = "", **extra: str) -> Outcome:
    done = subprocess.run(
        [*PROGRAM, *arguments],
        cwd=home,
        env=environment(home, **extra),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        **({"input": stdin} if stdin else {"stdin": subprocess.DEVNULL}),
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def kvbm_here(*arguments: str, home: Path, **extra: str) -> Outcome:
    """Runs the command in this process, without the start of an interpreter. Streams are pipes, as for `kvbm`."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    with (
        contextlib.chdir(home),
        mock.patch.dict(os.environ, environment(home, **extra), clear=True),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        exit_code = run(arguments)
    return Outcome(exit_code, *(_written_to(stream) for stream in (stdout, stderr)))


def _written_to(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


Kvbm = Callable[..., Outcome]


def ways(names: Iterable[str]) -> list[tuple[str, Kvbm]]:
    """Every name with `kvbm_here`, and every eighth also with `kvbm`, which must say the same."""
    names = list(names)
    return [*((name, kvbm_here) for name in names), *((name, kvbm) for name in names[::8])]


def on_a_terminal(*command: str, home: Path, columns: int, **extra: str) -> list[str]:
    """The lines that are shown on a terminal of that width."""
    exit_code, shown = typed("", *command, home=home, **extra, COLUMNS=str(columns), TERM="dumb")
    assert exit_code == 0, shown
    return shown.splitlines()


def typed(keys: str, *command: str, home: Path, **extra: str) -> tuple[int, str]:
    """The exit code, and what was seen on a terminal without echo on which the keys were typed."""
    leader, follower = pty.openpty()
    state = termios.tcgetattr(follower)
    state[3] &= ~termios.ECHO
    termios.tcsetattr(follower, termios.TCSANOW, state)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    with subprocess.Popen([*PROGRAM, *command], cwd=home, env=environment(home, **extra), **streams) as program:
        os.close(follower)
        os.write(leader, keys.encode())
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(leader, 4096):
                shown += part
        os.close(leader)
    return program.returncode, shown.decode().replace("\r\n", "\n")


def assert_snapshot(name: str, text: str) -> None:
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("KVBM_UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, f"{path.name} differs; KVBM_UPDATE_SNAPSHOTS=1 accepts it"


def stored_entries(file: str) -> dict[str, str]:
    """The entries of a snapshot file, in their order."""
    path = SNAPSHOTS / f"{file}.txt"
    before, *parts = re.split(r"^=== (.+)\n", path.read_text() if path.exists() else "", flags=re.MULTILINE)
    assert before == "", f"{path.name} does not begin with an entry"
    names, texts = parts[::2], parts[1::2]
    assert len(set(names)) == len(names), f"{path.name} has two entries of one name"
    return dict(zip(names, texts, strict=True))


def assert_entry(file: str, name: str, text: str, *, names: Iterable[str]) -> None:
    """Compares one entry of a snapshot file. `names` are all that the file has, in their order."""
    assert text.endswith("\n"), "an entry ends with its line"
    assert not re.search(r"^=== ", text, flags=re.MULTILINE), "only a header begins like this"
    entries, names = stored_entries(file), list(names)
    if os.environ.get("KVBM_UPDATE_SNAPSHOTS"):
        entries[name] = text
        entries = {one: entries[one] for one in names if one in entries}
        names = list(entries)  # the others may follow
        path = SNAPSHOTS / f"{file}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"=== {one}\n{content}" for one, content in entries.items()))
    assert entries.get(name) == text, f"{name} in {file}.txt differs; KVBM_UPDATE_SNAPSHOTS=1 accepts it"
    assert list(entries) == names, f"{file}.txt has other entries; KVBM_UPDATE_SNAPSHOTS=1 removes them"


def given_in(file: str) -> dict[str, str]:
    """The entries of a file that say what is given, up to a line `-----`. Behind it stands what is said of it."""
    return {name: re.split(r"^-----\n", text, flags=re.MULTILINE)[0] for name, text in stored_entries(file).items()}


def assert_said(file: str, name: str, said: str) -> None:
    """Compares what is said of what is given in an entry."""
    given = given_in(file)
    assert_entry(file, name, f"{given[name]}-----\n{said}\n", names=given)


def steps_of(text: str) -> list[tuple[str, str]]:
    """The commands of a transcript, each with what it shows."""
    before, *parts = re.split(r"^\$ (.+)\n", text, flags=re.MULTILINE)
    assert before == "", "a transcript begins with a command"
    return list(zip(parts[::2], parts[1::2], strict=True))


def words_of(line: str) -> tuple[dict[str, str], list[str]]:
    """The variables and the words behind the program of such as `PORT=1 kvbm serve --profile demo`."""
    words = shlex.split(line)
    program = words.index("kvbm")
    return dict(word.split("=", 1) for word in words[:program]), words[program + 1 :]


Tools = Mapping[str, Callable[..., str]]  # functions of a test, by the name that a transcript calls them


def transcript(text: str, home: Path, *, way: Kvbm = kvbm_here, tools: Tools | None = None) -> str:
    """Do what a transcript says and return what it should be. `$ cat FILE` makes the file unless a command has made it.
    `[ROOT]` is that of the repository, `[TMP]` the working directory, `[PYTHON]` this interpreter."""
    shown = "".join(_step(line, said, home, way, tools or {}) for line, said in steps_of(text))
    assert len(steps_of(shown)) == len(steps_of(text)), "a line of the output looks like a command"
    return shown


def _step(line: str, said: str, home: Path, way: Kvbm, tools: Tools) -> str:
    command = _placed(line, home)
    words = shlex.split(command)
    program = next(word for word in words if "=" not in word)
    if program == "cat":
        path = home / words[1]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_placed(said, home))
        return f"$ {line}\n{filtered(path.read_text())}"
    if program in tools:
        with contextlib.chdir(home):
            return f"$ {line}\n{tools[program](*words[1:])}"
    if program == "kvbm":
        variables, words = words_of(command)
        return way(*words, home=home, **variables).text(line)
    variables = environment(home, LC_ALL="C")
    done = subprocess.run(["sh", "-ec", command], cwd=home, env=variables, capture_output=True)
    assert done.returncode == 0, (line, done)
    return f"$ {line}\n{filtered((done.stdout + done.stderr).decode())}"


def _placed(text: str, home: Path) -> str:
    places = {"[ROOT]": str(ROOT), "[TMP]": str(home), "[PYTHON]": sys.executable}
    return re.sub(r"\[(ROOT|TMP|PYTHON)\]", lambda found: places[found[0]], text)


def assert_transcript(file: str, name: str, home: Path, **how: Any) -> None:
    """Follows one transcript of a file. The entry `files`, if there is one, makes the files of all of them."""
    entries = stored_entries(file)
    transcript(entries.get("files", ""), home)
    assert_entry(file, name, transcript(entries[name], home, **how), names=entries)
