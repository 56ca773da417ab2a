"""`kvbm try` of a real vLLM on a CPU: from its command line to a verdict, a report and a profile."""

import json

import pytest
from kvbm_serve import QUIET
from vllm_server import wait_until_old

from kvbm.engines.make_model import materialise
from kvbm_cli.try_.command import TryRequest, try_engine

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(0)]


def test_a_command_line_ends_with_a_verdict(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    wait_until_old(model := materialise("vllm-25m"))
    flags = ("--dtype", "float32", "--max-model-len", "32768", "--host", "0.0.0.0", "--port", "8123", "--enforce-eager")
    words = ("vllm", "serve", str(model), *flags)
    code = try_engine(TryRequest(words=words, minutes=3, is_confirmed=True, as_json=True))
    found = json.loads(capsys.readouterr().out)
    print(found["explanation"], *found["reasons"], found["try"], sep="\n")
    assert code in (0, 10, 11, 13)  # 11: this machine was too busy
    assert found["complete"] is True
    assert found["verdict"] != "wrong"
    (directory,) = (tmp_path / "kvbm" / "tries").iterdir()
    assert (directory / "report.html").exists()
    assert f"model: {model}" in (directory / "tried.yaml").read_text()
    assert found["try"]["took_s"] > 0
