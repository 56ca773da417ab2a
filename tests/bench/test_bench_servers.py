"""Running servers, given by their URLs: what they must have in common, and what is measured."""

import json
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from bench_rig import (
    COMPUTED_TOKEN_MS,
    PATIENT,
    REQUESTS,
    WORKLOAD,
    SilentProgress,
    in_turn,
    lines_of,
    timed,
    without_sampler,  # noqa: F401
    workload_file,
)
from certificates import server_tls
from mock_engine import MockEngine, Options

from kvbm.errors import EngineError, UsageError
from kvbm_cli.bench import command
from kvbm_cli.bench.arms import comparison_of
from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.engines import ArmEngines, running_server
from kvbm_cli.bench.experiment import run_experiment
from kvbm_cli.bench.preparation import capabilities_of
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.setup import Setup
from kvbm_cli.bench.summary import summarise
from kvbm_cli.bench.workload.schema import Schedule
from kvbm_cli.bench.workload.script import TextWriter, TokenWriter

pytestmark = pytest.mark.usefixtures("without_sampler")
PLAIN = Options(computed_token_ms=COMPUTED_TOKEN_MS)
POOR = replace(
    PLAIN, has_tokenize=False, has_token_ids=False, has_ignore_eos=False, has_usage=False, resets_to_refuse=-1
)


def capabilities(*options: Options):
    with ExitStack() as stack:
        servers = [stack.enter_context(MockEngine(one)) for one in options]
        engines = [running_server(server.url) for server in servers]
        found = capabilities_of(engines, seed=0)
        return found, servers


@pytest.mark.parametrize(
    ("options", "dialect", "writer", "can_reset"),
    [
        ([PLAIN], "ids eos usage", TokenWriter, True),
        ([replace(PLAIN, has_tokenize=False)], "eos usage", TextWriter(1.0), True),  # as the server counts
        ([replace(PLAIN, has_token_ids=False)], "eos usage", TokenWriter, True),
        ([replace(PLAIN, has_ignore_eos=False)], "usage", TokenWriter, True),
        ([replace(PLAIN, has_usage=False)], "", TokenWriter, True),
        ([POOR], "", TextWriter(4.0), False),
        # What one server lacks no server is sent.
        ([PLAIN, replace(PLAIN, has_token_ids=False)], "eos usage", TokenWriter, True),
        ([PLAIN, replace(PLAIN, resets_to_refuse=-1)], "ids eos usage", TokenWriter, False),
    ],
)
def test_servers_are_asked_for_what_they_understand(options, dialect, writer, can_reset):
    found, servers = capabilities(*options)
    known = {"ids": found.dialect.has_token_ids, "eos": found.dialect.has_ignore_eos, "usage": found.dialect.has_usage}
    assert [name for name, is_known in known.items() if is_known] == dialect.split()
    assert isinstance(found.writer, writer) if isinstance(writer, type) else found.writer == writer
    assert found.can_reset is can_reset
    assert all(server.bodies for server in servers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((PLAIN, replace(PLAIN, model="other")), "the servers serve different models: mock, other"),
        ((replace(PLAIN, refuses_all=True),), "refused a plain request to /v1/completions: HTTP 400: .*unknown"),
        ((PLAIN, replace(PLAIN, refuses_all=True)), "refused a plain request to /v1/completions: HTTP 400: .*unknown"),
    ],
)
def test_servers_that_cannot_be_compared_are_refused(options, message):
    with pytest.raises(EngineError, match=message):
        capabilities(*options)


def measured(tmp_path, *options: Options, pairs: int = 1, workload=WORKLOAD, progress=None, interval_s=0.04, tls=None):
    """The summary, and the servers with the bodies that they got. `tls`: of the first server, behind a path."""
    with ExitStack() as stack:
        servers = [MockEngine(one) for one in options]
        ca_file = None
        if tls is not None:
            (servers[0].tls, ca_file), servers[0].prefix = tls, "/gate"
        for server in servers:
            stack.enter_context(server)
        urls = [f"s{number}={server.url}" for number, server in enumerate(servers, start=1)]
        comparison = comparison_of((), (), urls, ca_file)
        schedule = Schedule(interval_s=interval_s, pairs=pairs)
        cell = Cell("small", workload.model_copy(update={"schedule": schedule}))
        setup = Setup(comparison, (cell,))
        path = tmp_path / "run"
        directory = stack.enter_context(
            closing(BenchDirectory.open(path) if path.exists() else BenchDirectory.create(path))
        )
        run_experiment(setup, ArmEngines(comparison), directory, progress or SilentProgress())
        return summarise(Results.read(directory), surroundings={}, limits=PATIENT), servers


def test_a_server_with_tls_behind_a_path_is_measured_like_another(tmp_path):
    """The requests, their preparation, its metrics and its cache are all at the same address."""
    summary, (server, _) = measured(tmp_path, PLAIN, PLAIN, tls=server_tls(tmp_path))
    assert all((one["compared"], one["different"]) == (REQUESTS, 0) for one in answers_of(summary)), summary["reasons"]
    assert server.resets


def answers_of(summary) -> list[dict]:
    ((found),) = [cell["answers"] for cell in summary["cells"]]
    return list(found.values())


@pytest.mark.parametrize(
    ("endpoint", "server", "logprob"),
    [("chat", PLAIN, 0.0), ("chat", replace(PLAIN, has_chat_logprobs=False), None), ("responses", PLAIN, None)],
)
def test_other_endpoints_are_measured_and_judged_by_text(tmp_path, endpoint, server, logprob):
    """The log-probabilities of a chat show what equal texts hide; a server may refuse to send them."""
    workload = WORKLOAD.model_copy(update={"endpoint": endpoint})
    summary, (server, other) = measured(tmp_path, server, PLAIN, workload=workload)
    for one in answers_of(summary):
        assert (one["compared"], one["different"]) == (REQUESTS, 0), summary["reasons"]
        assert one["largest_logprob_difference"] == logprob
    key = "messages" if endpoint == "chat" else "input"
    last = [server.bodies[-1][key], other.bodies[-1][key]]
    assert [one["role"] for one in last[0]] == ["system", "user", "assistant", "user"]
    assert last[0] == last[1]
    with (tmp_path / "run" / "requests.jsonl").open() as lines:
        records = [json.loads(line) for line in lines]
    assert all(one["cached_tokens"] is not None and one["output_tokens"] == 6 for one in records)
    assert any("prompts were messages" in one for one in summary["cells"][0]["caveats"])


def test_a_server_whose_certificate_nobody_vouches_for_is_refused_with_the_option(tmp_path):
    with pytest.raises(EngineError, match="CERTIFICATE_VERIFY_FAILED") as caught:
        measured(tmp_path, PLAIN, tls=(server_tls(tmp_path)[0], None))
    assert "`--ca-file`" in caught.value.hint


@timed
def test_two_servers_run_at_the_same_time_and_the_first_is_measured(tmp_path):
    slower = replace(PLAIN, base_ms=60.0)
    summary, servers = measured(tmp_path, PLAIN, slower, pairs=2)
    assert (summary["verdict"], summary["compared"]) == ("faster", {"measured": "s1", "reference": "s2"})
    assert summary["outputs_equal"] in (None, True)
    assert summary["cells"][0]["interleaved"] is True
    assert all(server.resets >= 2 for server in servers)
    prompts = [[body["prompt"] for body in server.bodies[-REQUESTS:]] for server in servers]
    assert prompts[0] == prompts[1]


def test_a_server_that_keeps_its_cache_at_a_reset_is_noticed(tmp_path):
    """Each pair sends the same prompts, so the second one finds all of them."""
    summary, _ = measured(tmp_path, PLAIN, replace(PLAIN, keeps_cache=True), pairs=2)
    assert summary["verdict"] == "invalid"
    assert (
        "the cache was not empty at the start of small.1.s2: turn 1 of session 0 found 432 of" in summary["reasons"][0]
    )
    assert not any("s1" in reason for reason in summary["reasons"])


def test_servers_that_cannot_be_emptied_get_other_prompts_in_every_pair(tmp_path):
    fixed = replace(PLAIN, resets_to_refuse=-1)
    summary, servers = measured(tmp_path, fixed, fixed, pairs=2)
    assert summary["cells"][0]["pairs_done"] == 2
    folder = tmp_path / "run" / "cells" / "small"
    assert sorted(path.name for path in folder.iterdir()) == ["plan-2.json", "plan.json"]
    first, second = (json.loads((folder / name).read_text()) for name in ("plan.json", "plan-2.json"))
    assert first["digest"] != second["digest"]
    sent = [json.dumps(body["prompt"]) for body in servers[1].bodies if body["max_tokens"] == WORKLOAD.answer_tokens]
    assert len(sent) == len(set(sent)) == 2 * REQUESTS
    assert servers[0].resets == 0
    assert {record["g1_tokens"] for record in lines_of(tmp_path) if record["turn"] == 1 and record["arm"] == "s2"} <= {
        0,
        16,
        32,
    }


def test_a_repeated_command_sends_other_prompts_to_a_server_that_cannot_be_emptied(tmp_path):
    fixed = replace(PLAIN, resets_to_refuse=-1)
    digests = set()
    for name in ("first", "second"):
        measured(tmp_path / name, fixed)
        plan = json.loads((tmp_path / name / "run" / "cells" / "small" / "plan.json").read_text())
        digests.add(plan["digest"])
    assert len(digests) == 2


def test_the_interval_of_servers_that_cannot_be_emptied_is_measured_with_other_prompts(tmp_path):
    fixed = replace(PLAIN, resets_to_refuse=-1, base_ms=20.0)
    measured(tmp_path, fixed, fixed, workload=WORKLOAD.model_copy(update={"answer_tokens": 3}), interval_s=None)
    assert not {json.dumps(record["g1_tokens"]) for record in lines_of(tmp_path) if record["turn"] == 1} - {
        *("0", "16", "32")
    }


def test_an_interruption_between_the_plans_of_two_pairs_loses_no_plan(tmp_path):
    class Interrupted(SilentProgress):
        def phase(self, text, **options):
            if [*self.phases, text].count("preparation: writing the prompts of small") == 2:
                raise KeyboardInterrupt
            super().phase(text, **options)

    fixed = replace(PLAIN, resets_to_refuse=-1)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, fixed, pairs=2, progress=Interrupted())
    folder = tmp_path / "run" / "cells" / "small"
    assert [path.name for path in folder.iterdir()] == ["plan.json"]
    with MockEngine(fixed) as server:
        plan = tmp_path / "run" / "plan.json"
        plan.unlink()  # it names the port of the first server
        comparison = comparison_of((), (), [f"s1={server.url}"])
        cell = Cell("small", WORKLOAD.model_copy(update={"schedule": Schedule(interval_s=0.04, pairs=2)}))
        with closing(BenchDirectory(tmp_path / "run")) as directory:
            run_experiment(Setup(comparison, (cell,)), ArmEngines(comparison), directory, SilentProgress())
    first, second = (json.loads((folder / name).read_text())["digest"] for name in ("plan.json", "plan-2.json"))
    assert first != second


@pytest.mark.parametrize("options", [POOR, replace(PLAIN, has_tokenize=False), replace(PLAIN, has_token_ids=False)])
def test_a_poor_server_is_measured_too(tmp_path, options):
    summary, servers = measured(tmp_path, options, options)
    assert summary["cells"][0]["arms"]["s1"]["errors"] == 0, lines_of(tmp_path)[0]["error"]
    assert summary["verdict"] in ("same", "inconclusive", "faster", "slower")
    body = servers[0].bodies[-1]
    assert isinstance(body["prompt"], str) is not options.has_tokenize
    assert len(body["prompt"]) >= WORKLOAD.prompt_tokens(2) - 6  # the whole conversation
    assert ("ignore_eos" in body) is options.has_ignore_eos
    assert ("stream_options" in body) is options.has_usage


def test_different_answers_of_two_servers_are_wrong_if_the_reference_repeats_its_own(tmp_path):
    """A cache in the measured server can cause this. So can another engine, which the guide says."""
    summary, _ = measured(tmp_path, PLAIN, replace(PLAIN, salt="other"), pairs=2)
    assert summary["cells"][0]["answers"]["s1"]["different"] > 0
    assert summary["verdict"] == "wrong", summary["explanation"]


@pytest.fixture
def workload(tmp_path):
    return workload_file(tmp_path, in_turn(interval_s=0.04))


def test_the_whole_command_with_the_url_of_a_server(tmp_path, capsys, workload):
    with MockEngine(PLAIN) as server:
        request = command.BenchRequest(
            compare=[server.url], workloads=[workload], output=tmp_path / "run", as_json=True
        )
        assert command.bench(request) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["verdict"] == "measured"
    assert summary["explanation"] == "measured url-1 alone: there is no reference to compare with"
    assert summary["cells"][0]["comparisons"] == []
    arm = summary["cells"][0]["arms"]["url-1"]
    assert (arm["requests"], arm["errors"]) == (REQUESTS, 0)
    assert summary["arms"] == {"url-1": {"kind": "url", "profile": None, "url": server.url, "differences": {}}}
    assert summary["profile"] is None


def test_pressure_takes_the_size_of_g1_from_the_server(tmp_path, capsys, workload):
    with MockEngine(replace(PLAIN, g1_blocks=100)) as server:
        request = command.BenchRequest(
            compare=[server.url], workloads=[workload], pressure="0.5,2", output=tmp_path / "run", as_json=True
        )
        assert command.bench(request) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [(cell["name"], cell["g1_tokens"]) for cell in cells] == [("small-x0.5", 1600), ("small-x2", 1600)]
    assert [cell["working_set_tokens"] for cell in cells] == pytest.approx([800, 3200], rel=0.35)
    with MockEngine(replace(PLAIN, has_metrics=False)) as server:
        request = command.BenchRequest(compare=[server.url], workloads=[workload], pressure="2")
        with pytest.raises(UsageError, match="the engine does not report it"):
            command.bench(request)


def test_a_server_that_is_not_there_is_an_error_before_a_directory_is_made(tmp_path, workload, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with MockEngine(PLAIN) as server:
        address = server.url
    with pytest.raises(EngineError, match=f"no server answers at {address}/v1/models: .*refused"):
        command.bench(command.BenchRequest(compare=[address], workloads=[workload]))
    assert not (tmp_path / "kvbm-runs").exists()
