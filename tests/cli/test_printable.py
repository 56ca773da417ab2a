"""No text of a profile, log, server or file name gives commands to the terminal."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_runs import facts
from terminal import PROGRAM, ROOT, environment, kvbm_here, on_a_terminal

from kvbm.text.outside import one_line
from kvbm_cli.bench.show import terminal as report
from kvbm_cli.engine.engine_log import EngineLog
from kvbm_cli.runs.run_directory import RunDirectory
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.terminal.console import table
from kvbm_cli.terminal.printable import printable, without_commands
from kvbm_cli.terminal.progress import ProgressDisplay

# Set the title, read the clipboard, move the cursor, C1 forms of both, backspace, override the direction of text.
EVIL = "a\x1b]0;x\x07b\x1b]52;c;?\x1b\\c\x1b[2Jd\x9b2Je\x9d0;f\x9c\x08g\rh\u202ei\u2066j\x7fk\x00l"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def assert_safe(text: str) -> None:
    assert OBEYED.search(text) is None, ascii(text)


def test_every_unsafe_character_is_escaped_and_every_other_kept():
    for code in (*range(0x300), *range(0x2000, 0x2100)):
        character = chr(code)
        kept = not OBEYED.match(character)
        assert (printable(character) == character) == kept, hex(code)
        assert (one_line(character) == character) == (kept and character not in "\n\t"), hex(code)
    assert printable("\x1b\x9b\u202e") == r"\x1b\x9b\u202e"


def test_own_commands_pass_the_streams_and_others_do_not():
    own = "\r\x1b[K\x1b[1;31merror:\x1b[0m text\r\n"
    assert without_commands(own) == own
    assert_safe(without_commands(own + EVIL).removeprefix(own))
    assert without_commands("\x1b[2K\rspoof") == r"\x1b[2K\x0dspoof"


def write_run(home: Path) -> Path:
    path = home / ".local/state/kvbm/runs/demo-1"
    path.mkdir(parents=True)
    log = path / "engine.log"
    log.write_bytes(EVIL.encode() + b"\n\xff\xfe not UTF-8\n10%\r100%\n\x1b[32mINFO\x1b[0m green\n")
    run = RunDirectory(path)
    more = {"profile": f"pro{EVIL}", "model": EVIL, "message": f"failed\n{EVIL}", "versions": {EVIL.strip("\0"): "1"}}
    clean = {name: value.replace("\0", "") if isinstance(value, str) else value for name, value in more.items()}
    clean["versions"] = {EVIL: "1"}
    run.begin(facts("demo-1", state=RunState.ENDED, ended_s=1.0, exit_code=1, logs={"engine": str(log)}, **clean))
    run.close()
    return log


@pytest.mark.parametrize("command", ["status", "status --all", "status demo-1"])
def test_run_with_commands_in_every_text_is_shown_without_them(tmp_path, command):
    write_run(tmp_path)
    shown = kvbm_here(*command.split(), home=tmp_path)
    assert_safe(shown.stdout + shown.stderr)
    assert "demo-1" in shown.stdout + shown.stderr


def test_log_on_a_terminal_is_shown_without_commands(tmp_path):
    log = write_run(tmp_path)
    lines = on_a_terminal("logs", "demo-1", home=tmp_path, columns=80)
    assert_safe("".join(lines))
    assert lines[-3:] == [r"\xff\xfe not UTF-8", "100%", "INFO green"]
    in_a_pipe = subprocess.run([*PROGRAM, "logs", "demo-1"], env=environment(tmp_path), capture_output=True)
    assert in_a_pipe.stdout == log.read_bytes()


def test_json_has_the_text_unchanged(tmp_path):
    write_run(tmp_path)
    shown = kvbm_here("status", "--all", "--json", home=tmp_path)
    assert_safe(shown.stdout)
    assert json.loads(shown.stdout)[0]["model"] == EVIL.replace("\0", "")


PROFILES = {
    "value": f"engine: {{model: {json.dumps(EVIL)}}}\ntiers: {{host: {{capacity: 1MiB}}}}\n",
    "key": f"engine: {{model: a}}\n{json.dumps(EVIL)}: 1\n",
    "size": f"engine: {{model: a}}\ntiers: {{host: {{capacity: {json.dumps(EVIL)}}}}}\n",
    "description": f"description: {json.dumps(EVIL)}\nengine: {{model: a}}\ntiers: {{host: {{capacity: 1MiB}}}}\n",
}


@pytest.mark.parametrize("content", PROFILES.values(), ids=PROFILES)
@pytest.mark.parametrize("command", ["profile show", "profile check", "size", "profile diff demo"])
def test_profile_with_commands_is_shown_without_them(tmp_path, content, command):
    path = tmp_path / "evil\x1b[2J.yaml"
    path.write_text(content)
    shown = kvbm_here(*command.split(), f"./{path.name}", home=tmp_path)
    assert shown.exit_code in (0, 1, 2)
    assert_safe(shown.stdout + shown.stderr)


@pytest.mark.parametrize("flags", [[], ["--debug"]])
def test_file_name_with_commands_is_reported_without_them(tmp_path, flags):
    """With --debug, Python itself prints the error."""
    name = f"./{EVIL}.yaml".replace("\0", "")
    program = [sys.executable, "-c", "from kvbm_cli.app import main; main()"]
    done = subprocess.run(
        [*program, *flags, "profile", "check", name], env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "\\x1b]0;x" in done.stderr
    assert_safe(done.stdout + done.stderr)


def test_phase_of_a_server_is_one_safe_line(capsys):
    with ProgressDisplay("starting", interval_s=0) as display:
        display.report(f"loading\nerror: spoofed{EVIL}")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert_safe(shown)


def test_cell_of_a_table_stays_in_its_row():
    shown = table([("run", "state"), (f"demo\nother  healthy{EVIL}", "ended")])
    assert len(shown.splitlines()) == 2
    assert_safe(shown)


def test_tail_of_a_log_has_no_colours(tmp_path):
    log = write_run(tmp_path)
    assert EngineLog(log, 0).lines()[-1] == "INFO green"


def test_texts_of_a_bench_summary_are_safe():
    # The rest of the report needs a whole run.
    assert_safe(report._printable({"hint": EVIL, "arms": [{"name": EVIL}]})["arms"][0]["name"])


# Everything else prints through kvbm_cli.terminal. These print JSON for kvbm itself, or only text of their own.
PRINTING = {
    *("kvbm_cli/app.py", "kvbm_cli/runs/logs.py", "kvbm_cli/save_tokenizer.py"),
    *("kvbm_cli/bench/diff.py", "kvbm_cli/bench/setup.py"),
}


def test_only_the_terminal_prints():
    found = set()
    for path in (ROOT / "kvbm_cli").rglob("*.py"):
        names = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
        if names & {"print", "sys.stdout.write", "sys.stderr.write", "sys.stdout.buffer.write", "typer.echo"}:
            found.add(os.fspath(path.relative_to(ROOT)))
    outside = {name for name in found if not name.startswith(("kvbm_cli/terminal/", "kvbm_cli/doctor/probes/"))}
    assert outside == PRINTING
