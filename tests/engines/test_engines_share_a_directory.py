"""Embedded engines share a directory, as in the profile `demo-shared`: one answers from what another one computed."""

import time

from kvbm_engine import assert_same, prompt, running

from kvbm.config.load import load
from kvbm_cli.package_data import profiles_directory

SIZE = {"num_blocks": 100, "max_model_len": 1024}
WAIT_S = 30.0


def on(directory):
    values = load("demo-shared", directories=(profiles_directory(),)).profile
    shared = {"url": f"file://{directory}/objects"}
    return running(host_blocks=100, shared=shared, offload={"to_shared": values.offload.to_shared}, **SIZE)


def wait_until(condition, what):
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not in {WAIT_S} s: {what}"
        time.sleep(0.01)


def knows_two_runs(engine):
    def known():
        shared = engine.leader._shared
        shared.receive()
        return len(shared.presence)

    return engine.between_steps(known) == 2


def test_the_first_request_of_an_engine_is_answered_from_what_another_one_computed(tmp_path):
    said = []
    with on(tmp_path) as first:
        said.append(first.ask(prompt(1, 600)).said())
        wait_until(lambda: knows_two_runs(first), "two runs of 256 tokens are written")
        with on(tmp_path) as second:
            wait_until(lambda: knows_two_runs(second), "the directory is listed")
            answer = second.ask(prompt(1, 600))
            said.append(answer.said())
            assert answer.last.num_shared_tokens == 512
            assert second.counters.shared_bad_objects == 0
    with running(**SIZE) as plain:
        assert_same(said, [plain.ask(prompt(1, 600)).said()] * 2)
