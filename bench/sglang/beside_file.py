"""kvbm beside SGLang's own storage backend `file`: TTFT, bytes per page, and what each does when something goes wrong.

    python bench/sglang/beside_file.py --output bench/results/NAME-sglang-beside-file

Run it as root with an interpreter that has SGLang 0.5.23 (`nox -s sglang` makes one) and this repository. It takes ten
minutes on two cores. It writes NAME.json with every sample, and NAME.md with the table.

    kvbm    KvbmHiCacheStorage on a disk of 1 GB
    file    HiCacheFile in a directory

Both are real servers on a CPU, with stand-ins for SGLang's kernels, float32, and the same flags; loads are waited for
(`hicache_storage_prefetch_policy: wait_complete`). The model has as many bytes of KV per token as Llama 3 8B in
bfloat16 (128 KiB). On a GPU, a hit reads these bytes, and computes only what is new. SGLang's attention in plain torch
computes all rows of the prompt after a hit too, which takes longer with the square of its length: so prompts are short.

Both servers run at the same time and get one request at a time, in random order within a round. Each question is asked
for one token, so its time is the time to first token.
Before it, `/flush_cache` empties device and host memory; a storage hit that was none ends the run. For a hit of the
kind `read`, Linux has no page of the files in memory, as with a storage larger than memory. kvbm never reads from there
(O_DIRECT).

Then each gets a file system that becomes full, a restart, a flipped bit in some pages, and at last a start with other
weights under the same name and in the same directory. Answers are compared with those that the server has computed, by
token and by log-probability.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
sys.path[:0] = [str(HERE.parent / "vllm"), str(TESTS), *(str(TESTS / name) for name in ("sglang_engine", "vllm"))]

from exchanges import save_twin  # noqa: E402
from facts import facts  # noqa: E402
from filesystems import mounted  # noqa: E402
from sglang_server import Reply, Server, disk_at, profile_of, serving  # noqa: E402

from kvbm.config.sglang_options import STORAGE  # noqa: E402
from kvbm.disk.superblock import read_superblock  # noqa: E402
from kvbm_cli import make_model  # noqa: E402

ARMS = ("kvbm", "file")
MODEL = {  # 128 KiB of float32 KV per token
    **make_model.MODELS["vllm-25m"],
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "intermediate_size": 512,
}
PAGE = 8  # 1 MiB
PROMPT_PAGES = 32
PROMPT_TOKENS = PROMPT_PAGES * PAGE + 1
PROMPTS = 6  # the pages of two fill the buffer of kvbm, so that a prompt that returns is on disk only
NEWEST_FIRST = tuple(reversed(range(PROMPTS)))
HIT = PROMPT_PAGES * PAGE
ANSWER_TOKENS = 8
FULL_CAPACITY = "88MiB"  # of a file system of 96 MiB; the pages of all prompts have 192 MiB
DAMAGED_PAGES = 3
HIGH_BYTE, EXPONENT_BIT = 3, 0x40  # of a float32: the number becomes huge or tiny
TOLERANCE = 0.001  # of log-probabilities
SETTLE_S = 0.3
ARGUMENTS = {
    "hicache_storage_prefetch_policy": "wait_complete",
    "sleep_on_idle": True,
    "page_size": PAGE,
    "max_total_tokens": 4 * HIT,
    "context_length": 2 * HIT,
    "hicache_storage_backend_extra_config": {"prefetch_threshold": PAGE},
}


def prompt(number: int) -> list[int]:
    chosen = random.Random(f"prompt {number}")
    return [chosen.randrange(10, 4000) for _ in range(PROMPT_TOKENS)]


class Arm:
    """One backend in its directory. `truth` has the answers that its server has computed."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, directory
        self.truth: list[Reply] = []
        self.ttft_s: dict[str, list[float]] = {"cold": [], "hit": [], "read": []}
        self.rows: dict[str, Any] = {}
        self._server: Server | None = None

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    @contextmanager
    def running(self, model: Path, log: Path) -> Iterator[None]:
        profile = profile_of(model, disk_at(self.directory), arguments=ARGUMENTS)
        say(f"starting {self.name}")
        with serving(profile, log, has_kvbm=self.name == "kvbm", more=self._flags()) as self._server:
            yield
        self._server = None

    def ask(self, number: int, count: int = ANSWER_TOKENS) -> tuple[float, Reply]:
        """Ask with empty device and host memory; return the seconds of the reply, and it."""
        self.server.flush()
        began_s = time.monotonic()
        reply = self.server.ask(prompt(number), count)
        return time.monotonic() - began_s, reply

    def compute(self) -> list[Reply]:
        """Return all answers without a storage."""
        self.server.detach()
        found = [self.ask(number)[1] for number in range(PROMPTS)]
        assert not any(sum(one.cached.values()) for one in found)
        return found

    def attach(self, directory: Path, **tiers: object) -> None:
        if self.name == "file":
            backend, extra = "file", file_storage(directory)
        else:
            ours = self.server.profile.connector_config().model_dump(mode="json") | {
                "tiers": disk_at(directory, **tiers)
            }
            backend, extra = "dynamic", {"prefetch_threshold": PAGE, **STORAGE, "kvbm": ours}
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

    def files(self) -> list[Path]:
        return sorted(path for path in self.directory.rglob("*") if path.is_file())

    def wait_until_stored(self) -> None:
        end_s = time.monotonic() + 120
        for number in range(PROMPTS):
            while self.ask(number, 1)[1].cached["storage"] != HIT:
                assert time.monotonic() < end_s, f"{self.name} does not store prompt {number}"

    def drop_pages(self) -> None:
        """Let Linux forget the content of the files."""
        for path in self.files():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read_pages(self) -> None:
        """Let Linux have the content of the files in memory. kvbm does not read from there."""
        for path in self.files() if self.name == "file" else ():
            path.read_bytes()

    def places(self) -> list[tuple[Path, int, int]]:
        """Return (file, offset, bytes on disk) of each page."""
        if self.name == "file":
            return [(path, 0, path.stat().st_blocks * 512) for path in self.files() if path.suffix == ".bin"]
        (arena,) = (path for path in self.files() if path.name == "arena")
        shape = read_superblock(arena.with_name("superblock"))
        assert shape is not None
        with tempfile.TemporaryDirectory() as copy:
            for path in arena.parent.glob("index.sqlite*"):
                shutil.copy(path, copy)
            with closing(sqlite3.connect(Path(copy, "index.sqlite"))) as index:
                slots = sorted(slot for (slot,) in index.execute("SELECT slot FROM blocks"))
        return [(arena, slot * shape.slot_bytes, shape.slot_bytes) for slot in slots]

    def _flags(self) -> tuple[str, ...]:
        extra = json.dumps(file_storage(self.directory))
        flags = ("--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", extra)
        return flags if self.name == "file" else ()


def file_storage(directory: Path) -> dict[str, object]:
    return {"file_storage_path": str(directory), "prefetch_threshold": PAGE}


def is_equal(one: Reply, other: Reply) -> bool:
    pairs = zip(one.answer.logprobs, other.answer.logprobs, strict=True)
    return one.answer.tokens == other.answer.tokens and all(abs(a - b) <= TOLERANCE for a, b in pairs)


@contextmanager
def running(arms: Sequence[Arm], model: Path, logs: Path) -> Iterator[None]:
    with ExitStack() as stack:
        for arm in arms:
            stack.enter_context(arm.running(model, logs / f"{arm.name}.log"))
        yield


def measure_ttft(arms: Sequence[Arm], rounds: int) -> None:
    for number in range(PROMPTS):
        for arm in arms:
            arm.ttft_s["cold"].append(arm.ask(number, 1)[0])
    for arm in arms:
        arm.wait_until_stored()
    before = pages_from_disk(arms[0])
    measure_hits(arms, rounds)
    arms[0].rows["pages_from_disk"] = pages_from_disk(arms[0]) - before
    assert arms[0].rows["pages_from_disk"] == 2 * rounds * PROMPT_PAGES, "kvbm has read pages from its own memory"


def pages_from_disk(arm: Arm) -> float:
    return arm.server.counters().get("kvbm_onboard_blocks_d2d", 0)


def measure_hits(arms: Sequence[Arm], rounds: int) -> None:
    chosen = random.Random(1)
    for turn in range(2 * rounds):
        number, kind = turn % PROMPTS, ("hit", "read")[turn % 2]
        for arm in chosen.sample(arms, len(arms)):
            (arm.drop_pages if kind == "read" else arm.read_pages)()
            seconds, reply = arm.ask(number, 1)
            assert reply.cached["storage"] == HIT, (arm.name, reply.cached)
            arm.ttft_s[kind].append(seconds)
            time.sleep(SETTLE_S)


def fill_a_disk(arm: Arm, home: Path) -> dict[str, object]:
    (own := home / f"full-{arm.name}").mkdir()
    with mounted("tmpfs", own) as mount:
        arm.attach(mount / "storage", capacity=FULL_CAPACITY)
        logged = len(arm.server.log.read_text())
        for number in range(PROMPTS):
            arm.ask(number)
            time.sleep(10 * SETTLE_S)
        arm.server.detach()  # so that only what is on disk is found
        arm.attach(mount / "storage", capacity=FULL_CAPACITY)
        found = arm.check()
        found["errors_logged"] = len(arm.server.log.read_text()[logged:].split("Failed to save")) - 1
        arm.server.detach()
    return found


def flip_bits(arm: Arm) -> dict[str, object]:
    """Flip a bit in pages drawn from those of the arm, and ask."""
    arm.server.detach()
    for path, offset, size in random.Random(2).sample(arm.places(), DAMAGED_PAGES):
        with path.open("r+b") as file:
            file.seek(offset + size // 2 + HIGH_BYTE)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ EXPONENT_BIT]))
    arm.attach(arm.directory)
    return arm.check()


def run(home: Path, rounds: int) -> list[Arm]:
    make_model.MODELS["wide-kv"] = MODEL
    make_model.make("wide-kv", first := home / "v1")
    other = save_twin(first, rows=range(4000))
    model = home / "model"
    model.symlink_to(first)
    arms = [Arm(name, home / f"storage-{name}") for name in ARMS]
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
            arm.rows["flipped"] = flip_bits(arm)
    model.unlink()
    model.symlink_to(other)
    with running(arms, model, home):
        for arm in arms:
            say(f"{arm.name}: other weights")
            replies = [arm.ask(number)[1] for number in NEWEST_FIRST]
            arm.truth = arm.compute()
            arm.rows["other_weights"] = arm.compare(replies)
    return arms


def median_ms(arm: Arm, kind: str) -> float:
    return round(statistics.median(arm.ttft_s[kind]) * 1000, 1)


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


def markdown(result: Mapping[str, Any], arms: Sequence[Arm]) -> str:
    rows = [
        ("TTFT of a storage hit, ms", *(str(median_ms(arm, "hit")) for arm in arms)),
        ("the same, files not in Linux's memory, ms", *(str(median_ms(arm, "read")) for arm in arms)),
        ("TTFT without a hit, ms", *(str(median_ms(arm, "cold")) for arm in arms)),
        ("bytes on disk per page", *(f"{arm.rows['page_bytes']:,}" for arm in arms)),
        ("after a restart", *(words(arm.rows["restart"]) for arm in arms)),
        (f"a flipped bit in {DAMAGED_PAGES} pages", *(words(arm.rows["flipped"]) for arm in arms)),
        ("a disk that becomes full", *(words(arm.rows["full_disk"]) for arm in arms)),
        ("other weights, same name and directory", *(words(arm.rows["other_weights"]) for arm in arms)),
    ]
    lines = [f"| | {' | '.join(arm.name for arm in arms)} |", "| --- | --- | --- |"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    found = result["ttft_of_kvbm_over_file"].items()
    ratios = ", ".join(f"{kind} {one['median']} ({one['low']} to {one['high']})" for kind, one in found)
    head = f"{result['date']}, {result['machine']} ({result['cpu']}), load average {result['load_average']}"
    last = f"TTFT of kvbm over that of file, median of pairs and its interval of 95 %: {ratios}."
    return "\n\n".join((head, "\n".join(lines), last)) + "\n"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24, help="pairs of each kind of storage hit")
    parser.add_argument("--output", type=Path, required=True, help="write OUTPUT.json and OUTPUT.md")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    home = Path(tempfile.mkdtemp(prefix="kvbm-sglang-"))
    try:
        arms = run(home, options.rounds)
    finally:
        shutil.rmtree(home)
    result = {
        "benchmark": "sglang_beside_file",
        **facts(("sglang", "torch", "kvbm-cli")),
        "command": ["python", *sys.argv],
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        "page_tokens": PAGE,
        "prompt_tokens": PROMPT_TOKENS,
        "ttft_of_kvbm_over_file": {kind: paired_ratio(arms, kind) for kind in ("hit", "read")},
        "arms": {arm.name: arm.rows for arm in arms},
        "samples_ms": {
            arm.name: {kind: [round(one * 1000, 1) for one in found] for kind, found in arm.ttft_s.items()}
            for arm in arms
        },
    }
    text = markdown(result, arms)
    options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
