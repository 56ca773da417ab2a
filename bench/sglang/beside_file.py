"""kvbm beside SGLang's own storage backend `file`: TTFT, bytes per page, and what each does when something goes wrong.

    python bench/sglang/beside_file.py --output bench/results/NAME-sglang-beside-file

Run it as root with an interpreter that has SGLang 0.5.23 (`nox -s sglang` makes one) and this repository. It takes
eight minutes on two cores. It writes NAME.json with every sample, and NAME.md with the table.

    kvbm    KvbmHiCacheStorage on a disk of 1 GB
    file    HiCacheFile in a directory

Both are real servers on a CPU, with stand-ins for SGLang's kernels, float32, and the same flags; loads are waited for
(`hicache_storage_prefetch_policy: wait_complete`). The model has as many bytes of KV per token as Llama 2 7B in
bfloat16 (512 KiB), or with `--model llama-3-8b` as Llama 3 8B (128 KiB), and little else to compute. On a GPU, a hit
reads these bytes, and computes only what is new. SGLang's attention in plain torch computes all rows of the prompt
after a hit too, which takes longer with the square of its length: so prompts are short.

Both servers run at the same time and get one request at a time, in random order within a round. Each question is asked
for one token, so its time is the time to first token. Before it, `/flush_cache` empties device and host memory; a
storage hit that was none ends the run. There are three kinds of storage hits:

    drive     no page is in memory, as with a storage larger than memory: Linux has dropped the content of the files
    memory    all pages are in memory: `file` has them in Linux's page cache, kvbm in its host memory (`tiers.host`)
    mixed     `file` has them in memory, and kvbm reads from the drive: without `tiers.host` it always does (O_DIRECT)

Then each gets a file system that becomes full, a restart, a flipped bit in some pages, and at last a start with other
weights under the same name and in the same directory. Answers are compared with those that the server has computed, by
token and by log-probability.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import ARMS, Place, drop_from_memory, files_in, flip_bits, full_disk, parser_of, save
from exchanges import save_twin
from sglang_server import Reply, Server, disk_at, profile_of, serving

from kvbm.engines import make_model
from kvbm.engines.sglang.options import STORAGE
from kvbm.tiers.disk.superblock import read_superblock

LAYERS, HEAD_DIM, FLOAT32_BYTES = 8, 256, 4
PAGE_BYTES = 1 << 20
PROMPT_PAGES = 32
PROMPTS = 6  # the pages of two fill the buffer of kvbm, so that a prompt that returns is on disk only
NEWEST_FIRST = tuple(reversed(range(PROMPTS)))
ANSWER_TOKENS = 8
FULL_CAPACITY = "88MiB"  # of a file system of 96 MiB; the pages of all prompts have 192 MiB
HOST_CAPACITY = "512MiB"  # more than the pages of all prompts
DAMAGED_PAGES = 3
HIGH_BYTE, EXPONENT_BIT = 3, 0x40  # of a float32: the number becomes huge or tiny
TOLERANCE = 0.001  # of log-probabilities
SETTLE_S = 0.3
KINDS = ("drive", "memory", "mixed")
TIMES = {
    "drive": "TTFT of a storage hit, no page in memory",
    "memory": "the same, all pages in memory",
    "mixed": "the same, those of `file` in memory, those of kvbm on the drive",
    "device": "TTFT of a hit in device memory",
    "computed": "TTFT without a hit",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, and the tokens of a page of PAGE_BYTES."""

    heads: int
    hidden_size: int

    @property
    def page_tokens(self) -> int:
        return PAGE_BYTES // (2 * LAYERS * self.heads * HEAD_DIM * FLOAT32_BYTES)

    @property
    def hit(self) -> int:
        """Tokens of a prompt in full pages; it has one more."""
        return PROMPT_PAGES * self.page_tokens

    def model(self) -> dict[str, object]:
        sizes = {"num_attention_heads": self.heads, "num_key_value_heads": self.heads, "head_dim": HEAD_DIM}
        sizes |= {"num_hidden_layers": LAYERS, "hidden_size": self.hidden_size}
        return {**make_model.MODELS["vllm-25m"], **sizes, "intermediate_size": 2 * self.hidden_size}

    def arguments(self) -> dict[str, object]:
        return {
            "hicache_storage_prefetch_policy": "wait_complete",
            "sleep_on_idle": True,
            "page_size": self.page_tokens,
            "max_total_tokens": 4 * self.hit,
            "context_length": 2 * self.hit,
            "hicache_storage_backend_extra_config": {"prefetch_threshold": self.page_tokens},
        }

    def prompt(self, number: int) -> list[int]:
        chosen = random.Random(f"prompt {number}")
        return [chosen.randrange(10, 4000) for _ in range(self.hit + 1)]


SHAPES = {"llama-2-7b": Shape(heads=32, hidden_size=64), "llama-3-8b": Shape(heads=8, hidden_size=256)}


class Arm:
    """One backend in its directory. `truth` has the answers that its server has computed."""

    def __init__(self, name: str, directory: Path, shape: Shape) -> None:
        self.name, self.directory, self.shape = name, directory, shape
        self.truth: list[Reply] = []
        self.ttft_s: dict[str, list[float]] = {kind: [] for kind in ("computed", "device", *KINDS)}
        self.rows: dict[str, Any] = {}
        self._server: Server | None = None

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    @contextmanager
    def running(self, model: Path, log: Path) -> Iterator[None]:
        profile = profile_of(model, disk_at(self.directory), arguments=self.shape.arguments())
        say(f"starting {self.name}")
        with serving(profile, log, has_kvbm=self.name == "kvbm", more=self._flags()) as self._server:
            yield
        self._server = None

    def ask(self, number: int, count: int = ANSWER_TOKENS) -> tuple[float, Reply]:
        """Ask with empty device and host memory; return the seconds of the reply, and it."""
        self.server.flush()
        return self.ask_again(number, count)

    def ask_again(self, number: int, count: int = ANSWER_TOKENS) -> tuple[float, Reply]:
        began_s = time.monotonic()
        reply = self.server.ask(self.shape.prompt(number), count)
        return time.monotonic() - began_s, reply

    def compute(self) -> list[Reply]:
        """Return all answers without a storage."""
        self.server.detach()
        found = [self.ask(number)[1] for number in range(PROMPTS)]
        assert not any(sum(one.cached.values()) for one in found)
        return found

    def attach(self, directory: Path, *, capacity: str = "1GB", **tiers: object) -> None:
        """Attach the backend; `tiers` are those of kvbm beside its disk."""
        if self.name == "file":
            backend, extra = "file", self._file_storage(directory)
        else:
            all_tiers = disk_at(directory, capacity=capacity) | tiers
            ours = self.server.profile.connector_config().model_dump(mode="json") | {"tiers": all_tiers}
            backend, extra = "dynamic", {"prefetch_threshold": self.shape.page_tokens, **STORAGE, "kvbm": ours}
        body = {"hicache_storage_backend": backend, "hicache_storage_backend_extra_config_json": json.dumps(extra)}
        status, text = self.server.try_call("PUT", "/hicache/storage-backend", body)
        assert status == 200, text

    def check(self) -> dict[str, object]:
        """Ask every prompt, the newest first."""
        return self.compare([self.ask(number)[1] for number in NEWEST_FIRST])

    def compare(self, replies: Sequence[Reply]) -> dict[str, object]:
        """Return how many answers are right, and how many tokens of each came from the storage, newest first."""
        right = [is_equal(one, self.truth[number]) for one, number in zip(replies, NEWEST_FIRST, strict=True)]
        return {"right": sum(right), "answers": PROMPTS, "hit_tokens": [one.cached["storage"] for one in replies]}

    def wait_until_stored(self) -> None:
        end_s = time.monotonic() + 120
        for number in range(PROMPTS):
            while self.ask(number, 1)[1].cached["storage"] != self.shape.hit:
                assert time.monotonic() < end_s, f"{self.name} does not store prompt {number}"

    def prepare(self, kind: str) -> None:
        """Let Linux have the content of the files in memory, or not. kvbm does not read from there."""
        if kind == "drive":
            drop_from_memory(self.directory)
        elif self.name == "file":
            for path in files_in(self.directory):
                path.read_bytes()

    def places(self) -> list[Place]:
        """Return where each page is."""
        files = files_in(self.directory)
        if self.name == "file":
            return [(path, 0, path.stat().st_blocks * 512) for path in files if path.suffix == ".bin"]
        (arena,) = (path for path in files if path.name == "arena")
        shape = read_superblock(arena.with_name("superblock"))
        assert shape is not None
        with tempfile.TemporaryDirectory() as copy:
            for path in arena.parent.glob("index.sqlite*"):
                shutil.copy(path, copy)
            with closing(sqlite3.connect(Path(copy, "index.sqlite"))) as index:
                slots = sorted(slot for (slot,) in index.execute("SELECT slot FROM blocks"))
        return [(arena, slot * shape.slot_bytes, shape.slot_bytes) for slot in slots]

    def _file_storage(self, directory: Path) -> dict[str, object]:
        return {"file_storage_path": str(directory), "prefetch_threshold": self.shape.page_tokens}

    def _flags(self) -> tuple[str, ...]:
        extra = json.dumps(self._file_storage(self.directory))
        flags = ("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", extra)
        return flags if self.name == "file" else ()


def is_equal(one: Reply, other: Reply) -> bool:
    pairs = zip(one.answer.logprobs, other.answer.logprobs, strict=True)
    return one.answer.tokens == other.answer.tokens and all(abs(a - b) <= TOLERANCE for a, b in pairs)


@contextmanager
def running(arms: Sequence[Arm], model: Path, logs: Path) -> Iterator[None]:
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:  # an SGLang starts in a minute
            starts = [pool.submit(stack.enter_context, arm.running(model, logs / f"{arm.name}.log")) for arm in arms]
        for start in starts:
            start.result()
        yield


def measure_ttft(arms: Sequence[Arm], rounds: int) -> None:
    kvbm = arms[0]
    for number in range(PROMPTS):
        for arm in arms:
            arm.ttft_s["computed"].append(arm.ask(number, 1)[0])
            arm.ttft_s["device"].append(arm.ask_again(number, 1)[0])
    for arm in arms:
        arm.wait_until_stored()
    say("hits of pages that are on the drive")
    before = pages_from_disk(kvbm)
    measure_hits(arms, rounds, ("drive", "mixed"))
    kvbm.rows["pages_from_disk"] = pages_from_disk(kvbm) - before
    assert kvbm.rows["pages_from_disk"] == 2 * rounds * PROMPT_PAGES, "kvbm has read pages from its own memory"
    say("hits of pages that are in memory")
    kvbm.server.detach()
    kvbm.attach(kvbm.directory, host={"capacity": HOST_CAPACITY})
    kvbm.wait_until_stored()
    before = pages_from_disk(kvbm)
    measure_hits(arms, rounds, ("memory",))
    assert pages_from_disk(kvbm) == before, "kvbm has read pages from its disk"


def pages_from_disk(arm: Arm) -> float:
    return arm.server.counters().get("kvbm_onboard_blocks_d2d", 0)


def measure_hits(arms: Sequence[Arm], rounds: int, kinds: Sequence[str]) -> None:
    chosen = random.Random(1)
    for turn in range(rounds * len(kinds)):
        number, kind = turn % PROMPTS, kinds[turn % len(kinds)]
        for arm in chosen.sample(arms, len(arms)):
            arm.prepare(kind)
            seconds, reply = arm.ask(number, 1)
            assert reply.cached["storage"] == arm.shape.hit, (arm.name, reply.cached)
            arm.ttft_s[kind].append(seconds)
            time.sleep(SETTLE_S)


def fill_a_disk(arm: Arm, home: Path) -> dict[str, object]:
    with full_disk(home / arm.name) as directory:
        arm.attach(directory, capacity=FULL_CAPACITY)
        logged = len(arm.server.log.read_text())
        for number in range(PROMPTS):
            arm.ask(number)
            time.sleep(10 * SETTLE_S)
        arm.server.detach()  # so that only what is on disk is found
        arm.attach(directory, capacity=FULL_CAPACITY)
        found = arm.check()
        found["errors_logged"] = len(arm.server.log.read_text()[logged:].split("Failed to save")) - 1
        arm.server.detach()
    return found


def damage(arm: Arm) -> dict[str, object]:
    """Flip a bit in pages drawn from those of the arm, and ask."""
    arm.server.detach()
    flip_bits(random.Random(2).sample(arm.places(), DAMAGED_PAGES), byte=HIGH_BYTE, bit=EXPONENT_BIT)
    arm.attach(arm.directory)
    return arm.check()


def run(home: Path, shape: Shape, rounds: int) -> list[Arm]:
    make_model.MODELS["wide-kv"] = shape.model()
    make_model.make("wide-kv", first := home / "v1")
    other = save_twin(first, rows=range(4000))
    model = home / "model"
    model.symlink_to(first)
    arms = [Arm(name, home / f"storage-{name}", shape) for name in ARMS]
    with running(arms, model, home):
        measure_ttft(arms, rounds)
        for arm in arms:
            say(f"{arm.name}: the answers that it computes, and a full disk")
            arm.rows["page_bytes"] = round(statistics.mean(size for *_, size in arm.places()))
            arm.truth = arm.compute()
            arm.rows["full_disk"] = fill_a_disk(arm, home)
    with running(arms, model, home):
        for arm in arms:
            say(f"{arm.name}: after a restart, and with flipped bits")
            arm.rows["restart"] = arm.check()
            arm.rows["flipped"] = damage(arm)
    model.unlink()
    model.symlink_to(other)
    with running(arms, model, home):
        for arm in arms:
            say(f"{arm.name}: other weights")
            replies = [arm.ask(number)[1] for number in NEWEST_FIRST]
            arm.truth = arm.compute()
            arm.rows["other_weights"] = arm.compare(replies)
    return arms


def paired_ratio(arms: Sequence[Arm], kind: str) -> dict[str, float]:
    """The first arm's time divided by that of the second, by round: the median, and its interval of 95 %."""
    one, other = (arm.ttft_s[kind] for arm in arms)
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    skipped = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))) - 1)  # ranks of a binomial
    found = {"median": statistics.median(ratios), "low": ratios[skipped], "high": ratios[-1 - skipped]}
    return {name: round(value, 3) for name, value in found.items()}


def words(row: Mapping[str, Any]) -> str:
    hits = ", ".join(f"{tokens:,}" for tokens in row["hit_tokens"])
    text = f"{row['right']} of {row['answers']} answers right; tokens from storage: {hits}"
    errors = row.get("errors_logged")
    return text if errors is None else f"{text}; {errors} failed writes logged"


def rows_of(arms: Sequence[Arm]) -> Iterator[tuple[str, ...]]:
    for kind, what in TIMES.items():
        yield f"{what}, ms", *(f"{statistics.median(arm.ttft_s[kind]) * 1000:.1f}" for arm in arms)
    yield "bytes on disk per page", *(f"{arm.rows['page_bytes']:,}" for arm in arms)
    for name, what in (
        ("restart", "after a restart"),
        ("flipped", f"a flipped bit in {DAMAGED_PAGES} pages"),
        ("full_disk", "a disk that becomes full"),
        ("other_weights", "other weights, same name and directory"),
    ):
        yield what, *(words(arm.rows[name]) for arm in arms)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    parser = parser_of(__doc__, rounds=16)
    parser.add_argument("--model", choices=SHAPES, default="llama-2-7b", help="whose bytes of KV per token")
    options = parser.parse_args()
    shape = SHAPES[options.model]
    with tempfile.TemporaryDirectory(prefix="kvbm-sglang-") as home:
        arms = run(Path(home), shape, options.rounds)
    ratios = {kind: paired_ratio(arms, kind) for kind in KINDS}
    details = {
        "benchmark": "sglang_beside_file",
        "model": options.model,
        "page_tokens": shape.page_tokens,
        "prompt_tokens": shape.hit + 1,
        "ttft_of_kvbm_over_file": ratios,
        "arms": {arm.name: arm.rows for arm in arms},
        "samples_ms": {
            arm.name: {kind: [round(one * 1000, 1) for one in found] for kind, found in arm.ttft_s.items()}
            for arm in arms
        },
    }
    texts = (f"{kind} {one['median']} ({one['low']} to {one['high']})" for kind, one in ratios.items())
    last = f"TTFT of kvbm over that of file, median of pairs and its interval of 95 %: {', '.join(texts)}."
    save(options.output, details, list(rows_of(arms)), last)
    return 0


if __name__ == "__main__":
    sys.exit(main())
