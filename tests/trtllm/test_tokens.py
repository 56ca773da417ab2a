"""Tokens with the cache are those without: conversations, faults, preemption and aborts, for every version."""

from __future__ import annotations

import pytest
from executor import BLOCK, Engine, Script, expected
from interface import VERSIONS

EVERYWHERE = [
    pytest.param(version, ranks, overlaps, id=f"{version}-{ranks}-{'overlap' if overlaps else 'plain'}")
    for version in VERSIONS
    for ranks in (1, 2)
    for overlaps in (False, True)
]
everywhere = pytest.mark.parametrize(("version", "ranks", "overlaps"), EVERYWHERE)


def conversations(engine, *, users=3, turns=3, first_id=1, stops_early=True, **more):
    """Run turns of several users: each prompt is the one before with its answer. Return (script, tokens) of all."""
    prompts = [tuple(range(100 * user, 100 * user + 9 + 2 * user)) for user in range(users)]
    request_id, results = first_id, []
    for turn in range(turns):
        scripts = []
        for user, prompt in enumerate(prompts):
            scripts.append(Script(request_id, prompt, 7, arrives=user, stops_early=stops_early and user == 1, **more))
            request_id += 1
        done = engine.run(scripts)
        results += [(script, done[script.request_id]) for script in scripts]
        prompts = [(*script.prompt, *done[script.request_id], 900 + turn) for script in scripts]
    return results


def assert_right(results, ranks):
    for script, tokens in results:
        assert tokens == expected(script, ranks), f"request {script.request_id}"


@everywhere
def test_conversations_get_the_tokens_of_an_engine_without_a_cache(version, ranks, overlaps):
    with Engine(version, rank_count=ranks, overlaps=overlaps, device_blocks=22) as engine:
        results = conversations(engine)
        assert_right(results, ranks)
        assert engine.counters.offload_blocks > 0
        engine.wait_for_saves()
        engine.forget_device()
        again = [Script(50 + index, script.prompt, 5) for index, (script, _) in enumerate(results)]
        done = engine.run(again)
        assert_right([(script, done[script.request_id]) for script in again], ranks)
        assert engine.external_tokens >= 3 * BLOCK * ranks
        assert engine.counters.onboard_blocks > 0
        assert not engine.leader._side.boundary.is_off
        assert engine.counters.faults == 0
