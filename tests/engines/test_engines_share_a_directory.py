"""Embedded engines share a directory, as in the profile `demo-shared`: one answers from what another one computed."""

import time

from kvbm_engine import assert_same, prompt, running

from kvbm.config.load import load
from kvbm_cli.package_data import profiles_directory

SIZE = {"num_blocks": 100, "max_model_len": 1024}
WAIT_S = 30.0


def on(directory, **options):
    values = load("demo-shared", directories=(profiles_directory(),)).profile
    shared = {"url": f"file://{directory}/objects", **options}
    return running(host_blocks=100, shared=shared, offload={"to_shared": values.offload.to_shared}, **SIZE)


def wait_until(condition, what):
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not in {WAIT_S} s: {what}"
        time.sleep(0.01)


def knows(engine, runs):
    def known():
        shared = engine.leader._shared
        shared.receive()
        return len(shared.presence)

    return engine.between_steps(known) >= runs


def test_the_first_request_of_an_engine_is_answered_from_what_another_one_computed(tmp_path):
    said = []
    with on(tmp_path) as first:
        said.append(first.ask(prompt(1, 600)).said())
        wait_until(lambda: knows(first, 2), "two runs of 256 tokens are written")
        with on(tmp_path) as second:
            wait_until(lambda: knows(second, 2), "the directory is listed")
            answer = second.ask(prompt(1, 600))
            said.append(answer.said())
            assert answer.last.num_shared_tokens == 512
            assert second.counters.shared_bad_objects == 0
    with running(**SIZE) as plain:
        assert_same(said, [plain.ask(prompt(1, 600)).said()] * 2)


def test_engines_with_different_secrets_keep_their_objects_apart(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).write_text(name * 16)
        (tmp_path / name).chmod(0o600)
    namespaces = tmp_path / "objects/v1"
    for number, name in enumerate(("one", "other", "one"), start=1):
        with on(tmp_path, protection="hmac", key_file=str(tmp_path / name)) as engine:
            answer = engine.ask(prompt(1, 300))
            wait_until(lambda engine=engine: knows(engine, 1), "a run of 256 tokens is known")
            assert len(list(namespaces.iterdir())) == min(number, 2)
            assert engine.counters.shared_bad_objects == 0
            assert answer.last.num_shared_tokens in ((0,) if number < 3 else (0, 256))
