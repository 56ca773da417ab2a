"""`kvbm bench trace` as a user sees it: output, JSON, errors, progress, and the examples in its documentation."""

import gzip
import json
import re
import shlex

import pytest
from trace_pages import HEAD, ROOT, examples_in, stripped

from kvbm_cli.bench.trace import command

PAGE = (ROOT / "docs/reference/trace.md").read_text()
EXAMPLES = examples_in(PAGE)


def test_the_page_has_examples():
    assert len(EXAMPLES) >= 2
    [line] = re.findall(r"^```json\n(.*)\n```$", PAGE, re.MULTILINE)
    assert line in gzip.decompress(HEAD.read_bytes()).decode().splitlines()


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_page_print_what_it_shows(kvbm, number):
    line, shown = EXAMPLES[number]
    _, out, err = kvbm(*shlex.split(line))
    assert stripped(out + err) == stripped(shown)


SECONDS = [{"timestamp": 0.529 * number, "input_length": 9, "output_length": 1} for number in range(99)]
FAILED = [{"timestamp": 1000 * number, "input_length": 9, "output_length": number % 3} for number in range(9)]
DOUBTS = {
    "seconds": (SECONDS, "1,910 requests per second: are these seconds? `{}time_scale{}1000` is for seconds"),
    "failed": (FAILED, "3 lines are skipped: `output_length` is 0"),
}


@pytest.mark.parametrize("name", DOUBTS)
def test_doubtful_traces_are_analysed_with_a_note_and_warned_of_as_a_workload(kvbm, tmp_path, name):
    lines, expected = DOUBTS[name]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "w.yaml").write_text("name: w\nkind: trace\nfile: t.jsonl\n")
    code, out, _ = kvbm("bench", "trace", tmp_path / "t.jsonl")
    assert code == 0
    assert expected.format("--", " ").replace("time_scale", "time-scale") in " ".join(out.split())
    code, _, err = kvbm("bench", "-p", "demo", "--dry-run", "--workload", tmp_path / "w.yaml")
    words = expected.format("", ": ").replace("1000`", "1000` in the workload")
    assert (code, err) == (0, f"warning: t.jsonl: {words}\n")


def test_plausible_traces_are_not_doubted(kvbm, tmp_path):
    (tmp_path / "w.yaml").write_text(f"name: w\nkind: trace\nfile: {HEAD}\n")
    assert kvbm("bench", "-p", "demo", "--dry-run", "--workload", tmp_path / "w.yaml")[::2] == (0, "")


def test_page_is_at_most_80_wide(kvbm):
    for more in ((), ("--model", "Qwen/Qwen3-8B"), ("--bytes-per-token", "1")):
        _, out, _ = kvbm("bench", "trace", HEAD, *more)
        assert max(map(len, out.splitlines())) <= 80


def test_json_has_the_numbers_of_the_page(kvbm):
    code, out, err = kvbm("bench", "trace", HEAD, "--bytes-per-token", "128KiB", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert (data["file"], data["requests"], data["sessions"], data["bytes_per_token"]) == (HEAD.name, 400, 400, 131072)
    assert data["ideal_hit_rate"] == pytest.approx(0.13687, abs=1e-5)
    [ninety] = [one for one in data["capacity_for_share_of_ideal"] if one["share"] == 0.9]
    assert ninety["bytes"] == ninety["tokens"] * 131072
    assert ninety["hit_rate"] >= 0.9 * data["ideal_hit_rate"]
    assert data["curve"][-1]["hit_rate"] == data["ideal_hit_rate"]
    rates = [one["hit_rate"] for one in data["curve"]]
    assert rates == sorted(rates)


def test_model_sets_the_bytes_of_a_token(kvbm):
    _, out, _ = kvbm("bench", "trace", HEAD, "--model", "Qwen/Qwen3-8B", "--json")
    assert json.loads(out)["bytes_per_token"] == 2 * 36 * 8 * 128 * 2


def test_options_of_the_format_are_used(kvbm, tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [
        {"at": 1000, "session_id": "a", "input_length": 30, "hash_ids": [1, 2]},
        {"at": 3000, "session_id": "a", "input_length": 40, "hash_ids": [1, 2, 3]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    options = ["--block-tokens", 16, "--time-scale", 2, "--column", "timestamp=at", "--turns", "whole", "--json"]
    data = json.loads(kvbm("bench", "trace", path, *options)[1])
    assert (data["duration_s"], data["largest_turn"], data["prompt_tokens"]["max"]) == (4.0, 2, 40)
    assert data["ideal_hit_rate"] == 16 / 70


def test_a_trace_in_which_nothing_repeats_has_no_plot(kvbm, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_length": 5}\n')
    code, out, _ = kvbm("bench", "trace", path)
    assert code == 0
    assert "ideal hit rate: 0.0% of the prompt tokens" in out
    assert "│" not in out
    data = json.loads(kvbm("bench", "trace", path, "--json")[1])
    assert (data["curve"], data["capacity_for_share_of_ideal"], data["duration_s"]) == ([], [], None)


def test_a_trace_of_texts_is_reported_without_hit_rates(kvbm, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text_input": "a", "output_length": 2, "x\\u001b[31m": 1}\n')
    code, out, _ = kvbm("bench", "trace", path)
    assert code == 0
    assert "so there are no hit rates" in out
    assert "\x1b" not in out
    assert json.loads(kvbm("bench", "trace", path, "--json")[1])["ideal_hit_rate"] is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing.jsonl"], "there is no file `missing.jsonl`"),
        ([ROOT / "README.md"], "README.md:1: not JSON"),
        ([HEAD, "--block-tokens", "16"], "requires 423 blocks of 16 tokens"),
        ([HEAD, "--block-tokens", "0"], "from 1 to 65536"),
        ([HEAD, "--time-scale", "nan"], "the time scale must be from"),
        ([HEAD, "--column", "x=y"], "a trace has no field `x`"),
        ([HEAD, "--turns", "all"], "`--turns` must be `added` or `whole`, not `all`"),
        ([HEAD, "--bytes-per-token", "0"], "`--bytes-per-token` must be from 1 to"),
        ([HEAD, "--bytes-per-token", "9" * 30], "`--bytes-per-token` must be from 1 to"),
        ([HEAD, "--bytes-per-token", "x"], "`--bytes-per-token` must be a size such as"),
        ([HEAD, "--bytes-per-token", "1", "--model", "m"], "use either `--bytes-per-token` or `--model`"),
    ],
)
def test_wrong_use_ends_with_2(kvbm, arguments, expected):
    code, out, err = kvbm("bench", "trace", *arguments)
    assert (code, out) == (2, "")
    assert expected in err


def test_an_unknown_model_gets_the_error_of_kvbm_size(kvbm):
    code, out, err = kvbm("bench", "trace", HEAD, "--model", "no/such-model")
    assert (code, out, err) == (*kvbm("size", "no/such-model")[:2], kvbm("size", "no/such-model")[2])
    assert code in (1, 2)


def test_progress_appears_on_stderr_after_a_while(kvbm, monkeypatch):
    assert kvbm("bench", "trace", HEAD)[2] == ""
    monkeypatch.setattr(command, "PROGRESS_AFTER_S", 0)
    assert re.search(r"trace +0\.\d s  reading, 0\.0 of 0\.0 MiB", kvbm("bench", "trace", HEAD)[2])
