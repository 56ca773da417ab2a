"""Weights that are exchanged again and again under one path, between the starts of engines and during them.

Two engines at a time share a disk directory and a store. Every answer must be that of the weights which the engine has
loaded: a question that is shorter than a block, and so never cached, tells which. Each seed draws other exchanges.

    OMP_NUM_THREADS=1 python -m pytest -n 0 -s -m soak tests/embedded/test_exchanged_again_and_again.py
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from contextlib import ExitStack, contextmanager
from random import Random

import exchanges
import pytest
import tiny_models
from exchanges import LONG_AGO_NS, WEIGHTS, directory_atomically
from kvbm_engine import assert_same, prompt, running

SECONDS = 60.0
SHORT = [token % tiny_models.VOCABULARY for token in prompt(7777, 10)]


def prompts(draw):
    found = [
        [token % tiny_models.VOCABULARY for token in prompt(seed, draw.choice((100, 180, 300)))] for seed in range(12)
    ]
    tails = [[token % tiny_models.VOCABULARY for token in prompt(seed, 80)] for seed in range(900, 905)]
    return found + [one[: draw.choice((40, 70, 90))] + tail for one, tail in zip(found, tails, strict=False)]


@pytest.fixture
def models(tmp_path):
    """v1, v2, and `current`, a link to one of them; `kept` has copies that nothing exchanges."""
    one = tiny_models.save("llama", tmp_path / "saved").rename(tmp_path / "v1")
    exchanges.save_twin(one, range(tiny_models.VOCABULARY))
    home = tmp_path / "models"
    for place in (home, tmp_path / "kept"):
        for name in ("v1", "v2"):
            shutil.copytree(tmp_path / name, place / name)
    (home / "current").symlink_to("v1")
    return home


def exchange(draw, home, ways=4):
    """One of a link, a rename, a replacement and an overwrite. The result may be the same weights as before."""
    way, name = draw.randrange(ways), draw.choice(("v1", "v2"))
    if way == 0:
        (home / "next").symlink_to(name)
        os.replace(home / "next", home / "current")
    elif way == 1:
        directory_atomically(home.parent)
    else:
        file, new = (home / "current").resolve() / WEIGHTS, home / "new"
        shutil.copyfile(home.parent / "kept" / name / WEIGHTS, new)
        os.utime(new, ns=(LONG_AGO_NS, LONG_AGO_NS))
        if way == 2:
            os.replace(new, file)
        else:
            with file.open("r+b") as target:
                target.write(new.read_bytes())
            os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS))


def options(draw, place):
    """A disk, a store, or both."""
    tiers = draw.choice((("disk",), ("shared",), ("disk", "shared")))
    sections = {
        "disk": {"directory": str(place / "disk"), "blocks": 60},
        "shared": {"url": f"file://{place}/store", "protection": "none"},
    }
    found = {tier: sections[tier] for tier in tiers} | {"offload": {f"to_{tier}": "always" for tier in tiers}}
    return {"num_blocks": 60, "host_blocks": draw.choice((14, 24)), "onboard": {"policy": "always"}, **found}


@contextmanager
def started(draw, home):
    """An engine in whose start, every second time, the weights are exchanged once more: a file that is overwritten
    while it is read would be neither v1 nor v2."""
    exchange(draw, home)
    late = threading.Timer(draw.random() / 4, exchange, (Random(draw.random()), home, 3))
    if is_exchanged := draw.random() < 0.5:
        late.start()
    with running(model=str(home / "current"), **options(draw, home.parent)) as engine:
        if is_exchanged:
            late.join()
        yield engine


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_every_answer_is_that_of_the_weights_which_the_engine_has_loaded(models, seed):
    draw = Random(seed)
    asked, truth, short = prompts(draw), {}, {}
    for name in ("v1", "v2"):
        with running(model=str(models.parent / "kept" / name)) as engine:
            truth[name] = [engine.ask(one).said() for one in asked]
            short[name] = engine.ask(SHORT).said()
    compared = engines = from_disk = from_store = 0
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s:
        with ExitStack() as stack:
            pair = [stack.enter_context(started(draw, models)) for _ in range(2)]
            loaded = [
                min(short, key=lambda name: abs(short[name][0][1] - engine.ask(SHORT).said()[0][1])) for engine in pair
            ]
            for _ in range(8):
                which = [(draw.randrange(2), draw.randrange(len(asked))) for _ in range(4)]
                answers = [pair[engine].submit(asked[number]) for engine, number in which]
                if draw.random() < 0.3:
                    exchange(draw, models)
                said = [answer.wait().said() for answer in answers]
                assert_same(said, [truth[loaded[engine]][number] for engine, number in which])
                compared += len(said)
                if draw.random() < 0.5:
                    for engine in pair:
                        engine.forget_g1()
            for engine in pair:
                engine.settle()
                from_disk += engine.counters.disk.fetched_blocks
                from_store += engine.counters.shared.fetched_blocks
                engines += 1
    print(f"seed {seed}: {compared} compared, 0 wrong, {engines} engines, blocks: {from_disk} disk, {from_store} store")
    assert min(from_disk, from_store) > 100
