import pytest

from kvbm.errors import EnvironmentProblem
from kvbm.host.machine_memory import THIS_MACHINE, HostMemory, node_of_pci_device
from kvbm.host.shared_memory import Kernel

GIB = 1 << 30


class FakeMachine:
    """Files as the kernel would show them, under a directory of the test's."""

    def __init__(self, root, *, available=8 * GIB):
        self.memory = HostMemory(proc=root / "proc", sys=root / "sys")
        self.write("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\n", root)
        self.write("proc/self/cgroup", "", root)
        self.root = root

    def write(self, path, text, root=None):
        file = (root or self.root) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, path, *, version, limit, usage, reclaimable=0):
        names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}
        limit_file, usage_file, line = names.get(version, ("memory.max", "memory.current", "inactive_file"))
        directory = "sys/fs/cgroup" + ("/memory" if version == 1 else "") + path
        self.write(f"{directory}/{limit_file}", f"{limit}\n")
        self.write(f"{directory}/{usage_file}", f"{usage}\n")
        self.write(f"{directory}/memory.stat", f"anon 5\n{line} {reclaimable}\nother 7\n")


@pytest.fixture
def machine(tmp_path):
    return FakeMachine(tmp_path)


def test_without_control_groups_the_room_is_what_the_machine_has_free(machine):
    assert machine.memory.room().available_bytes == 8 * GIB
    assert "machine" in machine.memory.room().limit


GROUPS = {  # version, the group of this process, (group, limit, usage, reclaimable), and the room
    "unused file pages do not count": (2, "0::/pod/box\n", [("/pod/box", 4 * GIB, 3 * GIB, GIB)], 2 * GIB),
    "the tightest group above counts": (
        2,
        "0::/pod/box\n",
        [("/pod/box", "max", GIB, 0), ("/pod", 2 * GIB, GIB, 0), ("", 6 * GIB, GIB, 0)],
        GIB,
    ),
    "over its limit": (2, "0::/\n", [("", GIB, 2 * GIB, 0)], 0),
    "version 1": (
        1,
        "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n",
        [("/a/b", 3 * GIB, GIB, GIB // 2), ("", (1 << 63) - 4096, GIB, 0)],
        5 * GIB // 2,
    ),
    "in a container, at the mount": (1, "4:memory:/docker/0123\n", [("", GIB, 0, 0)], GIB),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_control_groups_of_this_process_limit_the_room(machine, name):
    version, own, groups, room = GROUPS[name]
    machine.write("proc/self/cgroup", own)
    for path, limit, usage, reclaimable in groups:
        machine.group(path, version=version, limit=limit, usage=usage, reclaimable=reclaimable)
    assert machine.memory.room().available_bytes == room


def test_the_group_that_limits_the_room_is_named(machine):
    machine.write("proc/self/cgroup", "0::/pod/box\n")
    machine.group("/pod/box", version=2, limit=GIB, usage=0)
    assert "pod/box" in machine.memory.room().limit


def test_a_numa_node_limits_the_room(machine):
    text = "Node 1 MemFree:  1048576 kB\nNode 1 Active(file):  1024 kB\nNode 1 Inactive(file):  1024 kB\n"
    machine.write("sys/devices/system/node/node1/meminfo", text)
    room = machine.memory.room(node=1)
    assert room.available_bytes == GIB + (2 << 20)
    assert "NUMA node 1" in room.limit


def test_a_numa_node_that_does_not_exist_is_named(machine):
    with pytest.raises(EnvironmentProblem, match="NUMA node 7"):
        machine.memory.room(node=7)


def test_reserved_huge_pages_that_are_promised_to_somebody_are_not_free(machine):
    machine.write(
        "proc/meminfo",
        "MemAvailable: 8 kB\nHugePages_Total: 9\nHugePages_Free: 6\nHugePages_Rsvd: 2\nHugepagesize: 2048 kB\n",
    )
    assert machine.memory.huge_pages() == (2 << 20, 8 << 20)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("always", True), ("within_size", True), ("advise", True), ("never", False), ("deny", False), ("force", True)],
)
def test_shared_memory_has_transparent_huge_pages_only_where_the_kernel_gives_them(machine, setting, expected):
    text = "always within_size advise never deny force".replace(setting, f"[{setting}]")
    machine.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", text)
    assert machine.memory.has_transparent_huge_pages() is expected


def test_a_kernel_without_huge_pages_has_none(machine):
    assert machine.memory.has_transparent_huge_pages() is False


def test_nodes_are_counted_and_one_is_assumed(machine):
    assert machine.memory.node_count() == 1
    for node in range(3):
        machine.write(f"sys/devices/system/node/node{node}/meminfo", "")
    assert machine.memory.node_count() == 3


def test_the_node_of_a_device_is_what_its_bus_says(machine):
    machine.write("sys/bus/pci/devices/0000:1b:00.0/numa_node", "1\n")
    machine.write("sys/bus/pci/devices/0000:1c:00.0/numa_node", "-1\n")
    nodes = [node_of_pci_device(f"0000:{bus}:00.0", machine.memory) for bus in ("1B", "1c", "1d")]
    assert nodes == [1, None, None]


def test_this_machine_has_room_and_a_node():
    assert THIS_MACHINE.room().available_bytes > 0
    assert THIS_MACHINE.room(node=0).available_bytes > 0
    assert THIS_MACHINE.node_count() >= 1


def test_the_kernel_makes_a_barrier():
    Kernel().barrier()
