"""docs/guide/first-serve.md, typed in from the first line to the last: it prints what the page says it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvbm_cli.engine.process import choose_port

PAGE = Path(__file__).resolve().parents[2] / "docs/guide/first-serve.md"
BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
END = "--- end of command ---"


def steps(page: str) -> list[tuple[str, list[str]]]:
    """Every command of a page, with the lines that it is said to print."""
    found: list[tuple[list[str], list[str]]] = []
    for block in BLOCK.findall(page):
        is_open = False
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(([line[2:]], []))
            elif is_open:
                found[-1][0].append(line)
            else:
                found[-1][1].append(line)
                continue
            command = "\n".join(found[-1][0])
            is_open = ("<<EOF" in command and not command.endswith("\nEOF")) or (
                "{ " in command and "; }" not in command
            )
    return [("\n".join(command), lines) for command, lines in found]


def plain(line: str) -> str:
    """Without what differs from machine to machine: times, and where the checkout lies."""
    line = re.sub(r"\d+\.\d+ s", "T s", line)
    return re.sub(r"\(\S*/profiles/", "(profiles/", line).replace("(profiles/", "(").rstrip()


@pytest.mark.timeout(300)
def test_the_page_is_what_happens(tmp_path: Path) -> None:
    port = str(choose_port("127.0.0.1", 0))
    commands = steps(PAGE.read_text())
    assert len(commands) > 10
    script = "".join(f"{command}\necho '{END}'\n" for command, _ in commands)
    script = script.replace("--detach", f"--port {port} --detach").replace(":8000", f":{port}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "XDG_"))}
    environment |= {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            ["bash"],
            input=script,
            env=environment,
            cwd=tmp_path,
            text=True,
            capture_output=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
            check=False,
        )
    finally:
        subprocess.run([Path(sys.executable).with_name("kvbm"), "stop", "--all"], env=environment, check=False)
    printed = done.stdout.replace(f":{port}", ":8000").split(f"{END}\n")
    for (command, lines), output in zip(commands, printed, strict=False):
        have = [plain(line) for line in output.splitlines()]
        wanted = [plain(line) for line in lines if line != "..."]
        missing = [line for line in wanted if line not in have]
        assert not missing, f"$ {command}\n{output}\ndoes not print {missing}"
    assert len(printed) == len(commands) + 1
