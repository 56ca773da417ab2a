"""Short programs: what they write, while they run and after their end. Those that hang are in test_select.py."""

from kvbm.child import run as module
from kvbm.child.run import last_line, run


def test_of_much_output_only_the_end_is_read(monkeypatch):
    monkeypatch.setattr(module, "LONGEST_OUTPUT", 5)
    assert run(["echo", "a long answer"], timeout_s=None).out == "swer\n"


def test_output_is_seen_while_the_program_runs(tmp_path):
    seen = []

    def go_on(out):
        seen.append(out)
        if "ready" in out:
            (tmp_path / "go").touch()

    command = ["sh", "-c", 'echo ready; until [ -e "$0" ]; do sleep 0.01; done', str(tmp_path / "go")]
    ended = run(command, timeout_s=120, on_output=go_on)
    assert (ended.code, "ready\n" in seen) == (0, True)


def test_output_and_errors_are_apart_unless_they_are_merged():
    command = ["sh", "-c", "echo out; echo err >&2; exit 3"]
    assert run(command, timeout_s=None) == (3, "out\n", "err\n")
    assert run(command, timeout_s=None, merges=True) == (3, "out\nerr\n", "")


def test_the_last_line_has_content():
    assert last_line("one\ntwo\n \n") == "two"
    assert last_line("\n", "nothing") == "nothing"
