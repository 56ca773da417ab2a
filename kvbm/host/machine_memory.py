"""HostMemory: available memory, huge pages and NUMA nodes of this machine, read from /proc and /sys.

Both roots can be replaced for tests. Transparent huge pages apply to shared memory only where the kernel reports so.
The available memory is the minimum over the machine, the NUMA node and all control groups of this process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbm.errors import EnvironmentProblem

MARGIN_SHARE, LEAST_MARGIN_BYTES = 10, 2 << 30  # what `capacity: auto` leaves: a tenth, or this if it is more
UNLIMITED = 1 << 60  # cgroup v1 reports "no limit" as a large number
NVIDIA_VENDOR = "0x10de"
GPU_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers


@dataclass(frozen=True, slots=True)
class Room:
    """`available_bytes` of memory can be allocated; `limit` names what limits it."""

    available_bytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The machine's memory as /proc and /sys describe it."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")

    def room(self, node: int | None = None, *, process: int | str = "self") -> Room:
        """Return the tightest limit on memory for a process, on one NUMA node or on any."""
        return min(self.rooms(node, process=process), key=lambda room: room.available_bytes)

    def rooms(self, node: int | None = None, *, process: int | str = "self") -> list[Room]:
        """Return all limits on memory for a process."""
        rooms = [Room(self._meminfo(self.proc / "meminfo")["MemAvailable"], "free memory of this machine")]
        if node is not None:
            rooms.append(self._node_room(node))
        return [*rooms, *self._control_group_rooms(process)]

    def has_limit(self) -> bool:
        """Whether a control group limits the memory of this process."""
        return any(True for _ in self._control_group_rooms("self"))

    def huge_pages(self) -> tuple[int, int]:
        """Return (bytes of one huge page, bytes in reserved and unused huge pages)."""
        facts = self._meminfo(self.proc / "meminfo")
        page_bytes = facts.get("Hugepagesize", 0)
        return page_bytes, page_bytes * (facts.get("HugePages_Free", 0) - facts.get("HugePages_Rsvd", 0))

    def bytes_for_blocks(self) -> int:
        """Return the free memory for a tier: of any kind, or in reserved huge pages if these are more."""
        return max(self.room().available_bytes, self.huge_pages()[1])

    def has_transparent_huge_pages(self) -> bool:
        """Whether shared memory gets transparent huge pages, in any case or after madvise."""
        try:
            text = (self.sys / "kernel/mm/transparent_hugepage/shmem_enabled").read_text()
        except OSError:
            return False
        return any(f"[{value}]" in text for value in ("always", "within_size", "advise", "force"))

    def node_count(self) -> int:
        return sum(1 for _ in (self.sys / "devices/system/node").glob("node[0-9]*")) or 1

    def _node_room(self, node: int) -> Room:
        path = self.sys / f"devices/system/node/node{node}/meminfo"
        try:
            facts = self._meminfo(path)
        except OSError as error:
            raise EnvironmentProblem(f"NUMA node {node} cannot be read: {error}") from error
        cached = facts.get("Active(file)", 0) + facts.get("Inactive(file)", 0)
        return Room(facts["MemFree"] + cached, f"free memory of NUMA node {node}")

    @staticmethod
    def _meminfo(path: Path) -> dict[str, int]:
        """Return name to bytes, or to a plain count if the line has no unit."""
        lines = re.findall(r"^(?:Node +\d+ +)?([^\s:]+): +(\d+)( kB)?$", path.read_text(), re.MULTILINE)
        return {name: int(value) * (1024 if unit else 1) for name, value, unit in lines}

    def _control_group_rooms(self, process: int | str) -> Iterator[Room]:
        try:
            lines = (self.proc / str(process) / "cgroup").read_text().splitlines()
        except OSError:
            return
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from self._rooms_above(self.sys / "fs/cgroup", path, _VERSION_2)
            elif "memory" in controllers.split(","):
                yield from self._rooms_above(self.sys / "fs/cgroup/memory", path, _VERSION_1)

    @staticmethod
    def _rooms_above(mount: Path, path: str, files: _ControlGroupFiles) -> Iterator[Room]:
        """Yield the limits of a control group and its parents. In a container, the group is often at the mount itself,
        and its path exists only on the host."""
        group = mount / path.lstrip("/")
        for directory in (group, *group.parents):
            if (room := files.room(directory)) is not None:
                yield room
            if directory == mount:
                return


@dataclass(frozen=True, slots=True)
class _ControlGroupFiles:
    """Names of the files of one version of control groups."""

    limit: str
    usage: str
    reclaimable: str

    def room(self, group: Path) -> Room | None:
        """Return the room of a group: its limit minus its usage, where inactive file pages count as free."""
        try:
            limit = (group / self.limit).read_text().strip()
            usage = int((group / self.usage).read_text())
            statistics = (group / "memory.stat").read_text()
        except OSError:
            return None
        if limit == "max" or int(limit) >= UNLIMITED:
            return None
        found = re.search(rf"^{self.reclaimable} (\d+)$", statistics, re.MULTILINE)
        available = int(limit) - usage + (int(found[1]) if found else 0)
        return Room(max(0, available), f"memory limit of control group {group}")


_VERSION_1 = _ControlGroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _ControlGroupFiles("memory.max", "memory.current", "inactive_file")

THIS_MACHINE = HostMemory()


def margin_of(available_bytes: int) -> int:
    """Return how many of the available bytes, of memory or of a disk, kvbm leaves to others when it chooses a size."""
    return max(available_bytes // MARGIN_SHARE, LEAST_MARGIN_BYTES)


def gpus_of(memory: HostMemory = THIS_MACHINE) -> list[str]:
    """Return the PCI addresses of NVIDIA GPUs."""
    found = []
    for device in sorted((memory.sys / "bus/pci/devices").glob("*")):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == NVIDIA_VENDOR and kind.startswith(GPU_CLASSES):
            found.append(device.name)
    return found


def node_of_pci_device(address: str, memory: HostMemory = THIS_MACHINE) -> int | None:
    """Return the NUMA node of a PCI device such as `0000:1b:00.0`; None if the kernel does not report it."""
    try:
        node = int((memory.sys / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
