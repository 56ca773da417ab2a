"""Killed at any moment, and cut off from power: what is found afterwards is right, and nothing is lost but what may be.

A driver (crash_driver.py) works on one cache, is killed, and the cache is opened: every block in it is read and
compared with the pattern of its number, what the driver was told to be on disk is there, what it cleared is not, and
every slot can be written. Twenty rounds here; 300 under `-m soak`, whose numbers go to bench/results/ with
KVBM_WRITE_RESULTS=1. The power cut copies the image of a mounted file system, and opens the cache in the copy.
"""

import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from crash_driver import KEYS, POINTS, SLOT_COUNT
from disk_rig import LIMIT_S, instance_of, opened

HERE = Path(__file__).parent
MACHINE = f"{os.cpu_count()}cpu-{platform.machine().replace('_', '-')}-no-gpu"
RESULT = HERE.parents[1] / "bench" / "results" / f"{MACHINE}-disk-crashes.json"
ROUNDS_PER_POINT = 2
RANDOM_ROUNDS = 8
SOAK_ROUNDS_PER_POINT = 15
SOAK_RANDOM_ROUNDS = 210
LONGEST_LIFE_S = 0.4
MAX_COUNT = 25
IMAGE_BYTES = 384 << 20
CUTS = 3
SOAK_CUTS = 12


class Story:
    """What a driver has told: blocks that must be there, and numbers that must not."""

    def __init__(self, lines):
        self.kept = {}
        self.cleared = -1
        for line in lines:
            word, *numbers = line.split()
            if word == "written":
                self.kept[int(numbers[0])] = int(numbers[1])
            elif word == "evicting":
                self.kept.pop(int(numbers[0]), None)
            elif word == "cleared":
                self.cleared = int(numbers[0])
        self.kept = {number: slot for number, slot in self.kept.items() if number > self.cleared}


@contextmanager
def driver(directory, seed, *point):
    command = [sys.executable, str(HERE / "crash_driver.py"), str(directory), str(seed), *map(str, point)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), *sys.path]))}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            yield process
        finally:
            process.kill()


def end_of(process):
    """Its story, whose last line may have been cut."""
    lines, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL, errors
    return Story(line for line in lines.splitlines(keepends=True) if line.endswith("\n"))


def run_until_killed(directory, seed, chance, point):
    if point is not None:
        with driver(directory, seed, point, chance.randint(1, MAX_COUNT)) as process:
            return end_of(process)
    with driver(directory, seed) as process:
        time.sleep(chance.random() * LONGEST_LIFE_S)
        process.kill()
        return end_of(process)


def verify(directory, story, *, after_power_cut=False):
    """Open the cache as an engine would. Returns (blocks found, misses among them)."""
    with opened(directory, **KEYS) as rig:
        found = rig.recovered()
        slots = list(found.values())
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < SLOT_COUNT for slot in slots)
        assert min(found, default=story.cleared + 1) > story.cleared, "a cleared block is there again"
        result = rig.read(found, slots)  # compares every block that is said to be good
        misses = result.is_good.count(False)
        assert result.error is None
        if not after_power_cut:
            assert misses == 0, "index and arena do not agree"
            assert story.kept.items() <= found.items(), "a block that was reported as written is lost"
        counters = rig.tier.counters
        assert (counters.damaged_indexes, counters.damaged_superblocks, counters.dropped_rows) == (0, 0, 0)
        first = 10_000_000 + max(found, default=0) % 1000 * SLOT_COUNT
        free = [slot for slot in range(SLOT_COUNT) if slot not in set(slots)]
        numbers = range(first, first + len(free))
        if free:
            assert all(rig.write(numbers, free).is_good), "a slot is lost"
            assert all(rig.read(numbers, free).is_good)
            rig.tier.forget(free)
    instance_of(directory)  # one: the killed driver's was taken over
    return len(found), misses


def crash_rounds(directory, points, seed):
    chance = random.Random(seed)
    found_blocks = 0
    for number, point in enumerate(points):
        story = run_until_killed(directory, seed * 10_000 + number, chance, point)
        found_blocks += verify(directory, story)[0]
    return found_blocks


def shuffled_points(per_point, at_random, seed):
    points = [*POINTS] * per_point + [None] * at_random
    random.Random(seed).shuffle(points)
    return points


@pytest.mark.slow
def test_killed_at_named_points_and_at_random_moments(tmp_path):
    points = shuffled_points(ROUNDS_PER_POINT, RANDOM_ROUNDS, 1)
    assert len(points) >= 20
    assert crash_rounds(tmp_path, points, 1) > 0


OPENING = """
import sys
from pathlib import Path
from disk_rig import opened
with opened(Path(sys.argv[1]), **eval(sys.argv[2])) as rig:
    if rig.write([1], [1]).is_good == (True,):
        print("open", flush=True)
    sys.stdin.read()
"""


@contextmanager
def opening(directory, keys):
    """A process that opens a cache, writes a block, and waits."""
    command = [sys.executable, "-c", OPENING, str(directory), repr(keys)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), *sys.path]))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_killed_while_it_opens_grows_or_shrinks(tmp_path):
    chance = random.Random(5)
    with opened(tmp_path, **KEYS) as rig:
        assert all(rig.write(range(100, 148), range(48)).is_good)
    smallest = SLOT_COUNT
    for _ in range(8):
        count = chance.choice([24, 48, 400])
        with opening(tmp_path, {**KEYS, "block_count": count}):
            time.sleep(0.15 + 0.5 * chance.random())
        smallest = min(smallest, count)
        with opened(tmp_path, **{**KEYS, "block_count": 400, "host_slots": 64}) as rig:
            found = rig.recovered()
            assert all(rig.read(found, found.values()).is_good)
            expected = {100 + slot: slot for slot in range(2, smallest)}
            assert expected.items() <= found.items()
            assert rig.tier.counters.damaged_indexes == rig.tier.counters.damaged_superblocks == 0
    instance_of(tmp_path)


def test_cache_that_is_not_to_persist_leaves_nothing_when_it_is_killed(tmp_path):
    directory = tmp_path / "cache"
    with opening(directory, {"persist": False}) as process:
        assert process.stdout.readline() == "open\n"
        assert list(directory.iterdir()) == []
        process.kill()
        process.wait()
    assert list(directory.iterdir()) == []


@pytest.mark.soak
@pytest.mark.parametrize("part", range(5))
def test_killed_again_and_again(tmp_path, part):
    points = shuffled_points(SOAK_ROUNDS_PER_POINT // 5, SOAK_RANDOM_ROUNDS // 5, 100 + part)
    started = time.monotonic()
    found = crash_rounds(tmp_path, points, 100 + part)
    assert found > 0
    rounds = {str(point): points.count(point) for point in (*POINTS, None)}
    row = {"rounds": rounds, "blocks_compared": found, "seconds": round(time.monotonic() - started)}
    record("killed, nothing wrong or lost", f"part {part}", row)


# power cut


def why_no_images(kind):
    if os.geteuid() != 0:
        return "only root can mount"
    if not Path("/dev/loop-control").exists():
        return "no loop devices"
    if shutil.which(f"mkfs.{kind}") is None:
        return f"no mkfs.{kind}"
    if kind not in Path("/proc/filesystems").read_text().split():
        return f"the kernel knows no {kind}"
    return None


@contextmanager
def mounted(image, point):
    point.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True)
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def make_image(kind, images):
    """A new file system, and the path of its copy, as which it comes back after the cut."""
    image, copy = images / f"{kind}.img", images / f"{kind}-copy.img"
    for path in (image, copy):
        path.unlink(missing_ok=True)
    with open(image, "wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True, stderr=subprocess.DEVNULL)
    return image, copy


def copy_image(image, copy):
    subprocess.run(["cp", "--sparse=always", str(image), str(copy)], check=True)


def cut_power(kind, home, images, seed):
    """Drive a cache on a new file system, copy the image, and verify the cache in the copy."""
    chance = random.Random(seed)
    image, copy = make_image(kind, images)
    with mounted(image, home / "mounted") as point:
        with driver(point / "cache", seed) as process:  # leaves blocks, which opening and closing makes durable
            time.sleep(1)
            process.kill()
            verify(point / "cache", end_of(process))
        with driver(point / "cache", seed + 1) as process:
            time.sleep(chance.random())
            if chance.random() < 0.5:
                subprocess.run(["sync", "-f", str(point)], check=True)
                time.sleep(chance.random())
            process.send_signal(signal.SIGSTOP)  # a copy takes a moment; nothing else is written meanwhile
            copy_image(image, copy)
            process.kill()
            story = end_of(process)
    with mounted(copy, home / "mounted") as point:
        return verify(point / "cache", story, after_power_cut=True)


@pytest.fixture
def images():
    """Where images of file systems lie: in memory if possible."""
    home = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
    directory = home / f"kvbm-images-{os.getpid()}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("xfs", "btrfs"))])
def test_power_cut_costs_misses_at_most(tmp_path, images, kind):
    if (why := why_no_images(kind)) is not None:
        pytest.skip(why)
    results = [cut_power(kind, tmp_path, images, 200 + 2 * number) for number in range(CUTS)]
    assert sum(found for found, _ in results) > 0


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_clear_and_what_was_there_before_survive_a_power_cut(tmp_path, images, kind):
    if (why := why_no_images(kind)) is not None:
        pytest.skip(why)
    image, copy = make_image(kind, images)
    with mounted(image, tmp_path / "mounted") as point:
        with opened(point / "cache") as rig:
            rig.write(range(8), range(8), [b"a", b"b"] * 4)
        with opened(point / "cache") as rig:
            rig.clear(b"a")
            rig.write([20], [8])
            copy_image(image, copy)
    with mounted(copy, tmp_path / "mounted") as point, opened(point / "cache") as rig:
        found = rig.recovered()
        assert found.keys() - {20} == {1, 3, 5, 7}
        assert all(rig.read(found, found.values()).is_good)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_power_cut_again_and_again(tmp_path, images, kind):
    if (why := why_no_images(kind)) is not None:
        pytest.skip(why)
    results = [cut_power(kind, tmp_path, images, 300 + 2 * number) for number in range(SOAK_CUTS)]
    found, misses = map(sum, zip(*results, strict=True))
    assert found > 0
    row = {"rounds": SOAK_CUTS, "blocks_compared": found, "of_these_missed": misses}
    record("power cut, nothing wrong", kind, row)


def record(table, name, row):
    if not os.environ.get("KVBM_WRITE_RESULTS"):
        return
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    kept |= {"command": "pytest -m soak tests/disk/test_crashes.py", "machine": MACHINE}
    kept.setdefault(table, {})[name] = {"date": time.strftime("%Y-%m-%d"), **row}
    RESULT.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
