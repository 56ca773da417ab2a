"""`kvbm serve` of a disaggregated profile of TensorRT-LLM: stand-in engines behind a stand-in of its own server.

The plan of all of them is in `snapshots/transcripts/trtllm.txt`.
"""

import json
import signal

import psutil
import pytest
import yaml
from terminal import kvbm_here
from test_manage import status
from test_serve import RUNS, serving
from test_serve_trtllm import PROFILE
from test_serve_trtllm import home as home  # the fixture
from waiting import is_gone


@pytest.fixture
def pd(home):
    (home / "mine.yaml").write_text(f"{PROFILE}disaggregated: {{prefill: 2, decode: 1}}\n")
    return home


PLANNED = ("prefill-0", "prefill-1", "decode-0")


def test_all_start_and_a_signal_ends_all(pd):
    with serving(pd) as program:
        processes = psutil.Process(program.pid).children(recursive=True)
        (run,) = status(pd)
        directory = pd / RUNS / str(run["run"])
        assert sorted(file.name for file in directory.glob("*.yaml")) == [
            *("decode-0.yaml", "disaggregated.yaml", "prefill-0.yaml", "prefill-1.yaml", "profile.yaml"),
        ]
        assert program.url.endswith(f":{yaml.safe_load((directory / 'disaggregated.yaml').read_text())['port']}")
        assert program.code_after(signal.SIGTERM) == 0
    assert all(is_gone(process.pid) for process in processes)


def test_dry_run_as_json_has_every_file(pd):
    plan = json.loads(kvbm_here("serve", "-p", "./mine.yaml", "--dry-run", "--json", home=pd).stdout)
    assert list(plan["engines"]) == ["prefill 0", "prefill 1", "decode 0"]
    assert list(plan["files"]) == ["disaggregated.yaml"]
    assert [list(one["files"]) for one in plan["engines"].values()] == [[f"{name}.yaml"] for name in PLANNED]
