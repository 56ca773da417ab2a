"""`capacity: auto`: what is chosen on stand-ins for machines. Starts at once do not take the same memory."""

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from recorded_runs import facts, own
from terminal import kvbm_here

from kvbm.config.connector import resolve_connector
from kvbm.config.sizes import parse_size
from kvbm.engines.table import load
from kvbm.errors import EngineError, ProfileError
from kvbm.host.machine_memory import HostMemory
from kvbm.tiers.disk.directory import ARENA, SUPERBLOCK
from kvbm.tiers.disk.superblock import Superblock, write_superblock
from kvbm_cli.bench import engines
from kvbm_cli.bench.arms import comparison_of
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.auto_capacity import PROCESS_BYTES, with_capacities
from kvbm_cli.profile.machine_check import Severity
from kvbm_cli.profile.machine_problems import memory_check
from kvbm_cli.profile.size import size_of
from kvbm_cli.runs import memory_claims
from kvbm_cli.runs.memory_claims import MemoryClaim
from kvbm_cli.runs.reservations import pending_memory
from kvbm_cli.runs.run_directory import Runs
from kvbm_cli.runs.run_facts import RunState

GB, GIB, MIB = 10**9, 1 << 30, 1 << 20
TIERS = "tiers: {host: {capacity: auto}}\n"
GPU = "engine: {kind: vllm, model: Qwen/Qwen3-8B, arguments: {tensor_parallel_size: %d}}\n" + TIERS
CPU = "engine: {model: synthetic:tiny, arguments: {num_blocks: %d, device: cpu}}\n" + TIERS


class Machine:
    """Files as the kernel would show them."""

    def __init__(self, root: Path, available: int) -> None:
        self.root = root
        self.memory = HostMemory(proc=root / "proc", sys=root / "sys")
        self.write("proc/meminfo", f"MemAvailable: {available // 1024} kB\n")
        self.write("proc/self/cgroup", "0::/box\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def limit(self, limit: int, usage: int = 0) -> None:
        for name, text in {"max": limit, "current": usage, "stat": "inactive_file 0"}.items():
            self.write(f"sys/fs/cgroup/box/memory.{name}", f"{text}\n")

    def node(self, number: int, free: int, gpus: int) -> None:
        self.write(f"sys/devices/system/node/node{number}/meminfo", f"Node {number} MemFree: {free // 1024} kB\n")
        for index in range(gpus):
            device = f"sys/bus/pci/devices/0000:{number}{index}:00.0"
            for name, text in {"vendor": "0x10de", "class": "0x030200", "numa_node": str(number)}.items():
                self.write(f"{device}/{name}", text)


@pytest.fixture(autouse=True)
def nothing_else_starts(tmp_path, monkeypatch):
    """Of other tests on this machine, neither claims nor run directories count."""
    (tmp_path / "claims").mkdir()
    monkeypatch.setattr(memory_claims, "DIRECTORY", tmp_path / "claims")
    monkeypatch.setattr("kvbm_cli.profile.auto_capacity.living_runs", list)


def resolve(tmp_path: Path, text: str, *overrides: str, variables=None):
    (tmp_path / "mine.yaml").write_text(text)
    place = str(tmp_path / "mine.yaml")
    return load(place, directories=[profiles_directory()], overrides=overrides, variables=variables)


def host_of(resolved, machine: Machine) -> tuple[int, str]:
    chosen = with_capacities(resolved, memory=machine.memory)
    return chosen.profile.tiers.host.capacity_bytes, chosen.chosen["G2"]


def test_of_96_gb_a_tenth_is_left(tmp_path):
    capacity, reason = host_of(resolve(tmp_path, GPU % 1), Machine(tmp_path, 96 * GB))
    assert capacity == (96 * GB - 96 * GB // 10) // MIB * MIB
    assert "free memory of this machine, no memory limit is known" in reason
    assert reason.endswith("- a margin of 8.9 GiB")


def test_of_4_gb_in_a_control_group_2_gib_are_left(tmp_path):
    machine = Machine(tmp_path, 96 * GB)
    machine.limit(4 * GB, usage=100 * MIB)
    capacity, reason = host_of(resolve(tmp_path, GPU % 1), machine)
    assert capacity == (4 * GB - 100 * MIB - 2 * GIB) // MIB * MIB
    assert "memory limit of control group" in reason
    assert "no memory limit" not in reason


def test_a_control_group_without_a_limit_is_named(tmp_path):
    machine = Machine(tmp_path, 96 * GB)
    machine.write("proc/self/cgroup", "4:memory:/box\n")
    for name, text in {"limit_in_bytes": 2**63 - 4096, "usage_in_bytes": 5, "stat": ""}.items():
        machine.write(f"sys/fs/cgroup/memory/box/memory.{name}", f"{text}\n")
    assert "no memory limit is known" in host_of(resolve(tmp_path, GPU % 1), machine)[1]


def test_on_a_cpu_the_blocks_of_the_engine_come_first(tmp_path):
    machine = Machine(tmp_path, 32 * GIB)
    small, _ = host_of(resolve(tmp_path, CPU % 1000), machine)
    large, reason = host_of(resolve(tmp_path, CPU % 81_000), machine)
    assert small - large == 80_000 * 128 * 1024 // MIB * MIB
    assert "- 10.9 GiB for the embedded engine itself" in reason


def test_on_a_cpu_each_rank_is_a_process_more(tmp_path, monkeypatch):
    monkeypatch.setattr("kvbm.engines.vllm.kind.VllmKind.runs_on_cpu", lambda self, profile: True)
    machine, blocks = Machine(tmp_path, 64 * GIB), "engine.arguments.num_gpu_blocks_override=100"
    one, two, four = (host_of(resolve(tmp_path, GPU % ranks, blocks), machine)[0] for ranks in (1, 2, 4))
    assert (one - two, one - four) == (PROCESS_BYTES, 3 * PROCESS_BYTES)


def test_what_an_engine_takes_must_be_known(tmp_path, monkeypatch):
    monkeypatch.setattr("kvbm.engines.vllm.kind.VllmKind.runs_on_cpu", lambda self, profile: True)
    capacity, reason = host_of(resolve(tmp_path, GPU % 1), Machine(tmp_path, 32 * GIB))
    assert "only vLLM knows how much memory it takes" in reason
    assert capacity == 64 * 128 * 144 * 1024  # blocks of 128 tokens of 144 KiB


def test_nothing_to_spare_gives_the_least(tmp_path):
    capacity, reason = host_of(resolve(tmp_path, CPU % 1000), Machine(tmp_path, GIB))
    assert capacity == 64 * 128 * 1024
    assert reason.startswith("the minimum, because nothing is left of 1.0 GiB available")
    assert host_of(resolve(tmp_path, CPU % 1000), Machine(tmp_path, 8 * MIB))[0] == 4 * MIB


def test_ranks_that_bind_their_memory_take_what_their_nodes_have(tmp_path):
    machine = Machine(tmp_path, 900 * GIB)
    machine.node(0, 600 * GIB, gpus=4)
    machine.node(1, 100 * GIB, gpus=4)
    one, reason = host_of(resolve(tmp_path, GPU % 1), machine)
    assert (one, "on the NUMA nodes of the GPUs" in reason) == (90 * GIB, True)
    assert host_of(resolve(tmp_path, GPU % 8), machine)[0] == 180 * GIB  # four of eight ranks are on the full node
    unbound, _ = host_of(resolve(tmp_path, GPU % 1, "transfer.numa=false"), machine)
    assert unbound == 810 * GIB


def test_reserved_huge_pages_are_taken_if_they_are_more(tmp_path):
    machine = Machine(tmp_path, 20 * GIB)
    pages = "MemAvailable: 20971520 kB\nHugepagesize: 2048 kB\nHugePages_Free: 51200\nHugePages_Rsvd: 0\n"
    machine.write("proc/meminfo", pages)
    capacity, reason = host_of(resolve(tmp_path, GPU % 1), machine)
    assert 98 * GIB < capacity < 100 * GIB - 4 * MIB
    assert reason.endswith("of reserved huge pages are free")
    large = resolve(tmp_path, GPU % 1, "tiers.host.capacity=98GiB")
    assert memory_check(large, capacity, 1, [], memory=machine.memory).severity is Severity.OK
    machine.write("proc/meminfo", pages.replace("51200", "512"))
    assert host_of(resolve(tmp_path, GPU % 1), machine)[0] == 18 * GIB


def test_copies_of_an_engine_share_the_memory(tmp_path):
    copies = resolve(tmp_path, GPU % 1, "engine.arguments.data_parallel_size=4")
    assert host_of(copies, Machine(tmp_path, 96 * GIB))[0] == (96 * GIB - 96 * GIB // 10) // 4 // MIB * MIB


def test_explicit_sizes_win(tmp_path):
    for changes in (["tiers.host.blocks=7"], ["tiers.host.capacity=1GiB"]):
        resolved = resolve(tmp_path, GPU % 1, *changes)
        assert with_capacities(resolved, memory=Machine(tmp_path, GIB).memory) is resolved
    resolved = resolve(tmp_path, GPU % 1, variables={"DYN_KVBM_CPU_CACHE_GB": "3"})
    assert resolved.profile.tiers.host.capacity_bytes == 3 * GB


def test_every_command_has_sizes_in_place_of_auto(tmp_path):
    resolved = resolve(tmp_path, CPU % 100)
    assert size_of(resolved).host.block_count >= 64
    with pytest.raises(ProfileError, match="`capacity: auto` requires `kvbm serve`"):
        resolved.profile.tiers.host.capacity_bytes  # noqa: B018


def test_a_connector_without_kvbm_serve_refuses_auto():
    with pytest.raises(ProfileError) as caught:
        resolve_connector({"kvbm": {"tiers": {"host": {"capacity": "auto"}}}}, {}, engine="vllm")
    assert caught.value.hint == "set a size, such as `64GiB`"


def test_starts_at_once_do_not_take_the_same_memory(tmp_path):
    """Each chooses and claims as `kvbm serve` does, all at the same moment."""
    resolved, machine = resolve(tmp_path, CPU % 100), Machine(tmp_path, 96 * GIB)
    barrier, taken, files = threading.Barrier(4), [], []

    def start() -> None:
        barrier.wait()
        with memory_claims.claiming():
            capacity, _ = host_of(resolved, machine)
            taken.append(capacity)
            files.append(memory_claims.make(MemoryClaim(os.getpid(), capacity, 0)))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(memory_claims.claims()) == 4
    assert sum(taken) <= 96 * GIB
    assert max(taken) > 80 * GIB
    for file in files:
        memory_claims.release(file)
    assert list(memory_claims.DIRECTORY.iterdir()) == []


def test_a_claim_counts_until_the_engine_is_healthy_or_the_start_fails(tmp_path):
    runs = Runs(tmp_path)
    (tmp_path / "runs").mkdir()
    for is_success in (True, False):
        run = runs.create("demo")
        run.begin(facts(run.name, own(), memory_bytes=GIB, engine_bytes=MIB))
        assert memory_claims.claims() == [MemoryClaim(os.getpid(), GIB, MIB)]
        assert pending_memory([]) == pytest.approx(GIB, abs=GIB // 4)  # less the shared memory of this process
        if is_success:
            run.enter(RunState.HEALTHY)
        else:
            run.end(1, "failed")
        assert memory_claims.claims() == []
        run.close()


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_of_a_benchmark_claims_its_memory_until_it_is_healthy(fails, tmp_path, monkeypatch):
    """While it starts, another benchmark starts one."""
    monkeypatch.setattr("kvbm_cli.profile.auto_capacity.THIS_MACHINE", Machine(tmp_path, 96 * GIB).memory)
    (tmp_path / "mine.yaml").write_text(CPU % 100)
    start, taken = engines.ArmEngines(comparison_of((str(tmp_path / "mine.yaml"),), (), ())), []

    @contextmanager
    def launched(profile, log, *, has_kvbm):
        taken.append(profile.tiers.host.capacity_bytes)
        if len(taken) == 1:
            with start("kvbm", tmp_path, None):
                (claim,) = memory_claims.claims()
                assert claim.memory_bytes == pytest.approx(taken[0], abs=MIB)
                assert claim.engine_bytes >= 100 * 128 * 1024
        if fails:
            raise EngineError("not started")
        yield

    monkeypatch.setattr(engines, "launched", launched)
    with suppress(EngineError), start("kvbm", tmp_path, None):
        assert memory_claims.claims() == []
    assert memory_claims.claims() == []
    assert len(taken) == 2
    assert taken[0] > 80 * GIB
    assert sum(taken) <= 96 * GIB


def test_the_claim_of_a_killed_launcher_counts_no_longer():
    text = (
        "import os, sys\nfrom pathlib import Path\nfrom kvbm_cli.runs import memory_claims\n"
        "memory_claims.DIRECTORY = Path(sys.argv[1])\n"
        "file = memory_claims.make(memory_claims.MemoryClaim(os.getpid(), 2, 3))\nprint(flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", text, str(memory_claims.DIRECTORY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert memory_claims.claims() == [MemoryClaim(child.pid, 2, 3)]
        child.kill()
        child.wait()
        assert memory_claims.claims() == []
    assert list(memory_claims.DIRECTORY.iterdir()) == []


def test_what_no_launcher_wrote_is_no_claim():
    for number, content in enumerate((b"", b"1 2", b"1 2 x", b"1 2 -3", b"1 2 3 4", b"9" * 4000)):
        path = memory_claims.DIRECTORY / f"{memory_claims.PREFIX}{number}"
        path.write_bytes(content)
        with open(path, "rb") as file:
            memory_claims.fcntl.flock(file, memory_claims.fcntl.LOCK_EX)
            assert memory_claims.claims() == []
            assert path.exists()


def test_a_claim_counts_only_if_the_user_of_its_living_process_wrote_it(monkeypatch):
    """Every user of the machine can write and lock such a file."""
    with subprocess.Popen(["true"]) as ended:
        pass
    files = [memory_claims.make(MemoryClaim(pid, GIB, 0)) for pid in (ended.pid, os.getpid())]
    assert memory_claims.claims() == [MemoryClaim(os.getpid(), GIB, 0)]
    found = os.fstat
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_uid=os.geteuid() + 1, st_mode=found(fd).st_mode))
        assert memory_claims.claims() == []
    for file in files:
        memory_claims.release(file)


def test_a_claim_counts_for_no_more_than_its_control_group_has_left(tmp_path):
    machine = Machine(tmp_path, 96 * GIB)
    machine.write(f"proc/{os.getpid()}/cgroup", "0::/box\n")
    machine.write("proc/self/cgroup", "0::/\n")
    machine.limit(4 * GIB, usage=GIB)
    file = memory_claims.make(MemoryClaim(os.getpid(), 1000 * GIB, 0))
    assert pending_memory([], memory=machine.memory) == 3 * GIB
    memory_claims.release(file)


def test_a_lock_that_is_never_released_ends_no_start(monkeypatch):
    monkeypatch.setattr(memory_claims, "LOCK_LIMIT_S", 0.1)
    with memory_claims.claiming(), memory_claims.claiming():
        pass


def disk_of(tmp_path: Path, *changes: str) -> tuple[int, str]:
    text = "engine: {model: synthetic:tiny}\ntiers: {host: {capacity: 1GiB}, disk: {capacity: auto, directory: %s}}\n"
    chosen = with_capacities(resolve(tmp_path, text % (tmp_path / "disk"), *changes))
    assert chosen.profile.tiers.disk.fit
    return chosen.profile.tiers.disk.capacity_bytes, chosen.chosen["G3"]


@pytest.fixture
def space(monkeypatch):
    """Of the file system of the disk tier."""
    found = SimpleNamespace(f_bavail=100 * GIB // 4096, f_frsize=4096, f_blocks=1)
    monkeypatch.setattr("kvbm_cli.profile.auto_capacity.os.statvfs", lambda path: found)
    return found


def make_cache(tmp_path: Path, number: int, model: str, slots: int, slot_bytes: int) -> None:
    instance = tmp_path / "disk" / f"{number:016x}" / f"{number:016x}"
    instance.mkdir(parents=True, mode=0o700)
    (instance / "lock").touch(mode=0o600)
    facts = Superblock(instance.parent.name, {"model": model}, 16, slot_bytes, slot_bytes, slots, 0.0)
    write_superblock(instance / SUPERBLOCK, facts)
    (instance / ARENA).write_bytes(bytes(slots * slot_bytes))


def test_a_new_cache_takes_the_free_space_without_a_margin(tmp_path, space):
    capacity, reason = disk_of(tmp_path)
    assert (capacity, reason) == (90 * GIB, f"100.0 GiB free in {tmp_path}/disk - a margin of 10.0 GiB")
    space.f_bavail = 2 * GIB // 4096
    assert disk_of(tmp_path)[0] == 64 * 128 * 1024


def test_a_new_cache_takes_the_space_of_unused_ones_only_if_it_may_remove_them(tmp_path, space):
    make_cache(tmp_path, 1, "another", 160, MIB)
    assert disk_of(tmp_path)[0] == 90 * GIB
    capacity, reason = disk_of(tmp_path, "tiers.disk.reclaim=true")
    assert capacity == 90 * GIB + 144 * MIB
    assert reason == f"100.2 GiB free or in unused caches in {tmp_path}/disk - a margin of 10.0 GiB"


def test_a_cache_of_this_model_keeps_its_size_whatever_else_is_there(tmp_path):
    capacity = disk_of(tmp_path)[0]
    for number, (model, slots, slot_bytes) in enumerate(
        [("synthetic:tiny", 100, 131072), ("synthetic:tiny", 70, 65536), ("another", 900, 131072)]
    ):
        make_cache(tmp_path, number, model, slots, slot_bytes)
    damaged = tmp_path / "disk" / f"{7:016x}" / f"{7:016x}"
    damaged.mkdir(parents=True, mode=0o700)
    (damaged / SUPERBLOCK).write_text("kvbm disk cache format 99\n")
    (tmp_path / "disk" / f"{8:016x}" / f"{8:016x}").mkdir(parents=True, mode=0o700)  # its first engine was killed
    found, reason = disk_of(tmp_path)
    assert reason == "the cache that exists keeps its size"
    assert found == 100 * 131072 // MIB * MIB < capacity


def test_serve_says_what_it_chose(tmp_path):
    (tmp_path / "mine.yaml").write_text(CPU % 100)
    done = kvbm_here("serve", "-p", str(tmp_path / "mine.yaml"), "--dry-run", "--json", home=tmp_path)
    assert done.exit_code == 0, done.stderr
    shown = json.loads(done.stdout)
    assert "a margin of" in shown["chosen"]["G2"]
    connector = json.loads(shown["argv"][shown["argv"].index("--connector") + 1])
    assert parse_size(connector["tiers"]["host"]["capacity"]) == shown["tiers"]["G2"]["bytes"] // MIB * MIB


def test_vllms_own_offloading_gets_no_more_than_shared_memory_has(tmp_path, monkeypatch):
    facts = SimpleNamespace(f_bavail=20 * GB // 4096, f_frsize=4096)
    monkeypatch.setattr("kvbm_cli.profile.auto_capacity.os.statvfs", lambda path: facts)
    text = GPU.replace("{capacity: auto}", "{capacity: auto, managed_by: engine}, disk: {capacity: 1GB}") % 1
    capacity, reason = host_of(resolve(tmp_path, text), Machine(tmp_path, 96 * GB))
    assert capacity == 18 * GB // MIB * MIB
    assert "in /dev/shm, from which vLLM takes it" in reason
