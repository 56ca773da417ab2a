"""`profile check`, `serve --dry-run`, `serve` and `bench` find the same in a profile and on the machine.

A mistake in the profile ends all four with 2. A problem of the machine is a warning of the first two, and ends the
others with 1 before anything is started.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from mistakes import LOCK, MINE, VLLM, fifo, linked, taken_port
from terminal import Outcome, filtered, kvbm_here

from kvbm_cli.profile.machine_problems import container_bridges
from kvbm_cli.system.filesystem import missing_mount

COMMANDS = ("profile check mine.yaml", "serve --dry-run -p mine.yaml", "serve -p mine.yaml", "bench -p mine.yaml")
DISK = MINE + "  disk:\n    capacity: 256MiB\n    directory: ~/{}\nserver:\n  port: 0\n"
FREE = MINE + "server: {port: 0}\n"
LINKS = linked(("loop", "loop"), ("broken", "absent"), ("link", "there"))


def with_links(home: Path) -> AbstractContextManager[None]:
    (home / "there").mkdir()
    return LINKS(home)


@dataclass(frozen=True)
class Bad:
    """`said` begins the messages. `is_mistake`: in the profile, else on the machine."""

    profile: str
    said: tuple[str, ...]
    is_mistake: bool = False
    prepare: Callable[[Path], AbstractContextManager[None]] = lambda home: nullcontext()
    commands: tuple[str, ...] = COMMANDS


BAD = {
    "memory": Bad(FREE.replace("256MiB", "900TB"), ("`tiers.host.capacity` requires 818.5 TiB, but only ",)),
    "disk space": Bad(
        MINE + "  disk:\n    capacity: 9PB\nserver: {port: 0}\n", ("`tiers.disk.capacity` requires 8.0 PiB, but ",)
    ),
    "missing mount": Bad(DISK.format("mnt/nvme/a"), ("`tiers.disk.directory`: [HOME]/mnt/nvme does not exist: the ",)),
    "directory in a loop": Bad(
        DISK.format("loop/a"), ("`tiers.disk.directory`: cannot use [HOME]/loop: too many levels",), True, with_links
    ),
    "directory is a loop": Bad(
        DISK.format("loop"), ("`tiers.disk.directory`: [HOME]/loop is a symbolic link, which is not",), True, with_links
    ),
    "directory below a broken link": Bad(
        DISK.format("broken/a"), ("`tiers.disk.directory`: cannot use [HOME]/broken: no such file",), True, with_links
    ),
    "directory is a link": Bad(
        DISK.format("link"), ("`tiers.disk.directory`: [HOME]/link is a symbolic link, which is not",), True, with_links
    ),
    "directory is a file": Bad(
        DISK.format("mine.yaml"), ("`tiers.disk.directory`: [HOME]/mine.yaml is not a directory",), True
    ),
    "directory is a FIFO": Bad(
        DISK.format("pipe.yaml/a"), ("`tiers.disk.directory`: [HOME]/pipe.yaml is not a directory",), True, fifo
    ),
    "no model": Bad(
        FREE.replace("synthetic:tiny", "./no"), ("`engine.model`: there is no directory `[HOME]/no`",), True
    ),
    "model is a loop": Bad(
        FREE.replace("synthetic:tiny", "./loop"), ("`engine.model`: cannot use `[HOME]/loop`: too",), True, with_links
    ),
    "no interpreter": Bad(
        FREE.replace("tiers:", "  python: ./no\ntiers:"), ("`engine.python`: `[HOME]/no` is not an executable",), True
    ),
    "no engine": Bad(VLLM + "server: {port: 0}\n", ("`[PYTHON]` has no vLLM",)),
    "port": Bad(
        MINE + "server: {port: 18734}\n",
        ("cannot listen on 127.0.0.1 port [PORT]: address already in use",),
        prepare=taken_port,
        commands=COMMANDS[:3],  # bench serves on free ports
    ),
    "port of metrics": Bad(
        FREE + "metrics: {serve: true, port: 18734}\n",
        ("cannot listen on 127.0.0.1 port [PORT] for metrics: address already in use",),
        prepare=taken_port,
    ),
    "several": Bad(
        FREE.replace("256MiB", "900TB") + "metrics: {serve: true, port: 18734}\n",
        ("cannot listen on 127.0.0.1 port [PORT] for metrics", "`tiers.host.capacity` requires 818.5 TiB"),
        prepare=taken_port,
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BAD)
def test_all_commands_find_the_same(name, tmp_path, monkeypatch):
    bad = BAD[name]
    (tmp_path / "mnt").mkdir()
    monkeypatch.setattr("kvbm_cli.system.filesystem._FOR_MOUNTS", (tmp_path / "mnt",))
    (tmp_path / "mine.yaml").write_text(bad.profile)
    with bad.prepare(tmp_path):
        before = names_in(tmp_path)
        outcomes = {command: kvbm_here(*command.split(), home=tmp_path) for command in bad.commands}
        assert names_in(tmp_path) == before, "something was started"
    found = {command: messages(outcome, tmp_path) for command, outcome in outcomes.items()}
    assert list(found.values()) == [found[COMMANDS[0]]] * len(found)
    assert len(bad.said) == len(found[COMMANDS[0]])
    assert all(text.startswith(said) for text, said in zip(found[COMMANDS[0]], bad.said, strict=True)), found
    codes = [outcome.exit_code for outcome in outcomes.values()]
    assert codes == ([2] * 4 if bad.is_mistake else [0, 0, 1, 1])[: len(codes)]


def names_in(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.name not in LOCK)


def messages(outcome: Outcome, home: Path) -> list[str]:
    """The errors and warnings with their excerpts, without hints."""
    text = re.sub(r"only [\d.]+ \w+ (are available|free)", r"only [FREE] \1", filtered(outcome.stderr))
    text = text.replace(filtered(str(home)), "[HOME]")
    blocks = re.split(r"^(?:error|warning): ", text, flags=re.MULTILINE)[1:]
    return [block.partition("\n\n")[0].rstrip("\n") for block in blocks]


def test_a_good_profile_has_no_findings(tmp_path):
    (tmp_path / "mine.yaml").write_text(FREE)
    for command in COMMANDS[:2]:
        outcome = kvbm_here(*command.split(), home=tmp_path)
        assert (outcome.exit_code, outcome.stderr) == (0, "")


FSTAB = (
    "# a comment\nUUID=1 / ext4 defaults 0 1\n/dev/sdb1 {home}/data\\040drive xfs noauto 0 0\nnone none swap sw 0 0\n"
)


@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        ("{home}/data drive", "{home}/data drive is a mount point in {home}/fstab, but nothing is mounted there"),
        ("{home}/data drive/a/b", "{home}/data drive is a mount point in {home}/fstab, but nothing is mounted there"),
        ("{home}/data", None),
        ("{home}/a/b", None),
        ("/kvbm-absent", "/kvbm-absent does not exist: the drive may not be mounted"),
        ("/mnt/kvbm-absent/a/b", "/mnt/kvbm-absent does not exist: the drive may not be mounted"),
        ("/proc", None),
        ("/usr/kvbm-absent/a", None),
    ],
)
def test_missing_mount(tmp_path, directory, reason):
    (tmp_path / "fstab").write_text(FSTAB.format(home=tmp_path))
    (tmp_path / "data drive").mkdir()
    found = missing_mount(Path(directory.format(home=tmp_path)), fstab=tmp_path / "fstab")
    assert found == (None if reason is None else reason.format(home=tmp_path))


def test_no_fstab_is_no_problem(tmp_path):
    assert missing_mount(tmp_path / "a", fstab=tmp_path / "none") is None


def test_a_container_bridge_and_metrics_on_the_loopback_are_named(tmp_path, monkeypatch):
    interfaces = tmp_path / "net"
    for name in ("docker0/bridge", "virbr0/bridge", "eth0"):
        (interfaces / name).mkdir(parents=True)
    assert container_bridges(interfaces) == ["docker0"]
    assert container_bridges(tmp_path / "missing") == []
    monkeypatch.setattr("kvbm_cli.profile.machine_problems.container_bridges", lambda: ["docker0"])
    warning = "a Prometheus in a container cannot reach the metrics at 127.0.0.1"
    for metrics, is_named in (("{serve: true, port: 0}", True), ("{serve: true, port: 0, host: 0.0.0.0}", False)):
        (tmp_path / "mine.yaml").write_text(FREE + f"metrics: {metrics}\n")
        outcome = kvbm_here("profile", "check", "./mine.yaml", home=tmp_path)
        assert outcome.exit_code == 0
        assert (warning in " ".join(outcome.stderr.split())) == is_named
