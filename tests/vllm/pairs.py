"""Two servers of one model side by side: the reference, without cache and connector, and the tested one.

The tested one has a G1 so small that it forgets all the time, and the connector. What its answers must equal, and what
must have happened meanwhile, is said here once for all tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from traffic import Comparison, Conversation, Request, asker, assert_equal, hold, repeat
from vllm_server import (
    EXTERNAL_HITS,
    FAULTS_FILE,
    FAULTY_CONNECTOR,
    Answer,
    VllmServer,
    host_blocks,
)

from kvbm.engines.make_model import materialise

MAX_MODEL_LEN = 2048
NO_CACHE = "--no-enable-prefix-caching"
OFFLOADED, ONBOARDED = "kvbm_offload_blocks_d2h", "kvbm_onboard_blocks_h2d"
OFFLOADS_FAILED, ONBOARDS_FAILED = "kvbm_offload_failed_blocks", "kvbm_onboard_failed_blocks"
PREEMPTIONS = "vllm:num_preemptions_total"


def adapters_of(names: str) -> tuple[str, ...]:
    """Arguments for the adapters of vllm-25m with these names, of a letter each."""
    adapters = [f"{name}={materialise(f'vllm-25m-lora-{name}')}" for name in names]
    return ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *adapters)


class Faults:
    """Orders to the copier of a faulty connector, in a file of this directory; see faulty_connector.py."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "faults"
        self.order()

    def order(self, **faults: object) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(faults))
        os.replace(new, self.path)


@dataclass(frozen=True, slots=True)
class Moved:
    """What a stretch of work changed in the tested server's counters."""

    before: dict[str, float]
    after: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.after.get(name, 0.0) - self.before.get(name, 0.0)

    def __str__(self) -> str:
        names = (OFFLOADED, ONBOARDED, EXTERNAL_HITS, OFFLOADS_FAILED, ONBOARDS_FAILED, PREEMPTIONS)
        return ", ".join(f"{name.removesuffix('_total')} {self[name]:g}" for name in names)


class Pair:
    """See the module's text."""

    def __init__(self, reference: VllmServer, tested: VllmServer, faults: Faults) -> None:
        self.reference = reference
        self.tested = tested
        self.faults = faults
        self._truth: dict[tuple[Conversation, ...], dict[Request, Answer]] = {}

    def truth(self, talks: Sequence[Conversation]) -> dict[Request, Answer]:
        """What the reference says; it is asked once."""
        key = tuple(talks)
        if key not in self._truth:
            self._truth[key] = hold(asker(self.reference), talks)
        return self._truth[key]

    def forget(self) -> None:
        """Both caches of the tested server are empty afterwards."""
        self.settle()
        assert self.tested.reset_prefix_cache(external=True)

    def forget_g1(self) -> None:
        """What is found afterwards comes from the host."""
        self.settle()
        assert self.tested.reset_prefix_cache(external=False)

    def settle(self) -> None:
        """No request is live and no copy is on its way."""
        self.tested.wait_until("rest", is_at_rest)

    def check(self, talks: Sequence[Conversation]) -> tuple[Comparison, Moved]:
        """The tested server must say the same; what it did for that is returned."""
        return self.check_against(self.truth(talks))

    def check_against(self, truth: dict[Request, Answer], **fields: object) -> tuple[Comparison, Moved]:
        before = self.tested.metrics()
        answers = repeat(asker(self.tested, **fields), list(truth))
        comparison = assert_equal(answers, truth)
        self.settle()
        moved = Moved(before, self.tested.metrics())
        print(f"{comparison}; {moved}")
        return comparison, moved


def is_at_rest(metrics: dict[str, float]) -> bool:
    live = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
    return live == 0 and metrics["vllm:kv_cache_usage_perc"] == 0


def assert_cache_was_used(moved: Moved, *, at_least_blocks: int) -> None:
    """Require transfers well above zero: without them, equal answers say nothing about the cache. Choose a number far
    below the usual one, which depends on the order in which concurrent requests arrive."""
    assert moved[OFFLOADED] >= at_least_blocks, str(moved)
    assert moved[ONBOARDED] >= at_least_blocks, str(moved)
    assert moved[EXTERNAL_HITS] > 0, str(moved)


@contextmanager
def pair_of(
    preset: str,
    *arguments: str,
    blocks: int,
    reference_blocks: int = 200,
    host: int = 1000,
    tested_arguments: Sequence[str] = (),
    connector: dict[str, str] = FAULTY_CONNECTOR,
    reference: VllmServer | None = None,
):
    """Both start at the same time. `arguments` are for both. A `reference` that was started
    with them elsewhere goes on afterwards.
    """
    with TemporaryDirectory() as directory:
        model, faults = materialise(preset), Faults(Path(directory))
        common = {"max_model_len": MAX_MODEL_LEN, "wait": False}
        own = None if reference else VllmServer(model, NO_CACHE, *arguments, blocks=reference_blocks, **common)
        tested = VllmServer(
            model,
            *arguments,
            *tested_arguments,
            blocks=blocks,
            connector=connector,
            environment=host_blocks(host) | {FAULTS_FILE: str(faults.path)},
            **common,
        )
        with own or nullcontext(reference) as reference, tested:
            for server in (reference, tested):
                server.wait_healthy()
            yield Pair(reference, tested, faults)
