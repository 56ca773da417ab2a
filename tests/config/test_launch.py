"""The whole launch plan of the embedded engine."""

import sys
from typing import Any

import pytest

from kvbm.config.schema import Profile
from kvbm.engines.embedded.launch import plan

DEFAULT_FLAGS = ["--num-blocks", "2048", "--block-size", "16", "--dtype", "float32"]
DEFAULT_FLAGS += ["--device", "auto", "--seed", "0", "--kv-layout", "block_first"]


def profile(engine: dict[str, Any] | None = None, server: dict[str, Any] | None = None) -> Profile:
    return Profile.model_validate(
        {
            "engine": {"model": "synthetic:tiny", **(engine or {})},
            "tiers": {"host": {"blocks": 8}},
            "server": server or {},
        }
    )


def test_plan_of_the_defaults() -> None:
    made = plan(profile(), connector=False, port=8123)
    head = ["-m", "kvbm.engines.embedded", "--model", "synthetic:tiny", "--host", "127.0.0.1", "--port", "8123"]
    assert made.argv == (sys.executable, *head, *DEFAULT_FLAGS)
    assert dict(made.environment) == {}
    assert (made.base_url, made.health_url) == ("http://127.0.0.1:8123", "http://127.0.0.1:8123/health")
    assert made.model == "synthetic:tiny"


def test_connector_is_the_only_difference_between_the_arms() -> None:
    chosen = profile()
    baseline, candidate = (plan(chosen, connector=connector, port=1).argv for connector in (False, True))
    assert candidate[: len(baseline)] == baseline
    assert candidate[len(baseline)] == "--connector"
    assert Profile.model_validate_json(candidate[-1]) == chosen


def test_every_argument_becomes_a_flag() -> None:
    arguments = {
        "num_blocks": 64,
        "block_size": 32,
        "dtype": "bfloat16",
        "device": "cpu",
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 3,
        "seed": 7,
        "threads": 2,
        "prefix_caching": False,
        "verify": False,
        "kv_layout": "layer_first",
        "worker_process": True,
        "served_model_name": "m",
    }
    made = plan(profile({"python": "/p", "arguments": arguments, "environment": {"A": "1"}}), connector=False, port=1)
    assert " ".join(made.argv) == (
        "/p -m kvbm.engines.embedded --model synthetic:tiny --host 127.0.0.1 --port 1 --num-blocks 64 --block-size 32 "
        "--dtype bfloat16 --device cpu --max-model-len 4096 --max-num-batched-tokens 512 --max-num-seqs 3 "
        "--seed 7 --threads 2 --no-prefix-caching --no-verify --kv-layout layer_first --worker-process "
        "--served-model-name m"
    )
    assert (made.model, dict(made.environment)) == ("m", {"A": "1"})
    assert set(arguments) == set(type(profile().engine.arguments).model_fields)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:5"), ("::", "http://[::1]:5"), ("::1", "http://[::1]:5"), ("h", "http://h:5")],
)
def test_url_is_one_that_a_client_can_reach(host: str, url: str) -> None:
    assert plan(profile(server={"host": host}), connector=False, port=5).base_url == url


def test_no_argument_of_a_process_has_the_variables_of_the_engine() -> None:
    chosen = profile({"environment": {"HF_TOKEN": "hf_secret", "OTHER": "also"}})
    made = plan(chosen, connector=True, port=1)
    assert dict(made.environment) == {"HF_TOKEN": "hf_secret", "OTHER": "also"}
    assert not {"hf_secret", "also"} & set("\0".join(made.argv).replace('"', "\0").split("\0"))
