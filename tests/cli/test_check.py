"""What `kvbm profile check` and `kvbm serve --dry-run` find before an engine starts, each at its line and column."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from terminal import kvbm_here, on_a_terminal, ways

from kvbm.errors import EnvironmentProblem
from kvbm_cli.profile.machine_problems import _disk_space, _filesystem, require_none
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.profile.size import size_of
from kvbm_cli.store.caches import CacheFacts

PROFILE = """\
engine:
  model: synthetic:tiny
  python: {python}
  arguments:
    num_blocks: 64
    max_model_len: 1024
tiers:
  host:
    capacity: 64MiB
server:
  host: 127.0.0.1
  port: 8000
bench:
  workload: conversations
"""
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}
LLAMA = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 256}
# What mistakes.py has no row for.
MISTAKES = {
    "model: synthetic:huge": (
        "`engine.model`: unknown model `synthetic:huge`",
        "use one of `synthetic:tiny`, `synthetic:small`, `synthetic:8b`",
    ),
    "model: ./gpt2": ("/gpt2` is a `gpt2` model, which the embedded engine does not support", "cohere2, deepseek_v3"),
    "model: ./shapeless": ("the model's configuration has no valid `num_hidden_layers`", None),
    "model: ./empty": ("/empty/config.json`: no such file", "a model directory contains `config.json`"),
    "model: ./broken": ("/broken/config.json` is not JSON", "a model directory contains `config.json`"),
    "model: ./unnamed": ("/unnamed/config.json` has no `model_type`", "supported models, text only: cohere2"),
    "max_model_len: 1025": (
        "`max_model_len` is 1025 tokens, but G1 holds at most 1024",
        "raise `engine.arguments.num_blocks`",
    ),
}


@pytest.fixture
def home(tmp_path):
    """A working directory with models that are wrong in various ways."""
    for name, text in {
        "gpt2": json.dumps(GPT2),
        "shapeless": json.dumps(LLAMA),
        "broken": "{",
        "unnamed": "{}",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "empty").mkdir()
    return tmp_path


def write(home: Path, *changes: str) -> dict[str, int]:
    """Writes the profile with some lines replaced; returns the line number of each of `changes`."""
    lines = PROFILE.format(python="python3").splitlines()
    numbers = {}
    for change in changes:
        number = next(
            number
            for number, line in enumerate(lines)
            if line.strip().startswith(f"{change.split(':')[0]}:") and not line.endswith(":")
        )
        indent = len(lines[number]) - len(lines[number].lstrip())
        lines[number] = " " * indent + change
        numbers[change] = number + 1
    (home / "mine.yaml").write_text("\n".join(lines) + "\n")
    return numbers


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("change", "way"), ways(MISTAKES))
def test_check_finds_what_a_dry_run_finds(home, change, way):
    number = write(home, change)[change]
    checked = way("profile", "check", "./mine.yaml", home=home)
    tried = way("serve", "--dry-run", "-p", "./mine.yaml", home=home)
    message, hint = MISTAKES[change]
    assert (checked.exit_code, checked.stdout) == (2, "")
    assert checked == tried
    assert message in checked.stderr.splitlines()[0]
    assert f"\n  mine.yaml:{number}:" in checked.stderr
    assert "^" * len(change.split(": ")[1]) in checked.stderr
    assert hint is None or hint in checked.stderr.partition("\nhint: ")[2]


def test_check_finds_a_mistake_inside_a_workload(home):
    write(home, "workload: ./mine-too.yaml")
    (home / "mine-too.yaml").write_text("name: x\nuserz: 3\n")
    outcome = kvbm_here("profile", "check", "./mine.yaml", home=home)
    assert outcome.exit_code == 2
    assert "userz" in outcome.stderr
    assert "mine-too.yaml" in outcome.stderr


DISKS = {
    "tiers.disk.directory=/dev/null/x": (2, "error: `tiers.disk.directory`: /dev/null is not a directory"),
    "tiers.disk.directory=/proc/x": (
        0,
        "warning: `tiers.disk.directory`: /proc is a proc filesystem, which cannot hold",
    ),
    "tiers.disk.directory=/dev/shm/x": (
        0,
        "warning: `tiers.disk.directory`: /dev/shm is a tmpfs filesystem, which uses",
    ),
    "tiers.disk.capacity=1KiB": (2, "error: a disk tier of 1KiB is too small: one block requires 128KiB"),
    "tiers.disk.capacity=900TiB": (0, "warning: `tiers.disk.capacity` requires 900.0 TiB, but ~/.cache/kvbm has only "),
}


@pytest.mark.parametrize("override", DISKS)
def test_a_disk_that_cannot_be_is_found_before_an_engine_starts(home, override):
    outcome = kvbm_here("serve", "--dry-run", "-p", "demo-disk", "--set", override, home=home)
    exit_code, message = DISKS[override]
    assert outcome.exit_code == exit_code
    assert outcome.stderr.startswith(message)
    assert f"\n  --set {override}\n" in outcome.stderr


@pytest.mark.parametrize(("directory", "is_fatal"), [("/proc", True), ("/sys/a/b", True), ("/dev/shm", False)])
def test_a_disk_tier_in_the_kernel_is_refused_and_one_in_memory_is_reported(directory, is_fatal):
    problems = list(_filesystem(resolve("demo-disk", overrides=[f"tiers.disk.directory={directory}"])))
    assert [one.is_risk for one in problems] == [not is_fatal]
    assert not any(one.can_be_forced for one in problems)


def test_a_link_to_a_directory_in_memory_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("/dev/shm")
    assert len(list(_filesystem(resolve("demo-disk", overrides=[f"tiers.disk.directory={tmp_path}/link/a"])))) == 1


SPACE = (1 << 40, 1 << 30)  # of the file system and of it free, in bytes


@pytest.mark.parametrize(
    ("wanted", "is_used", "ends"),
    [
        ("512MiB", False, "fits"),
        ("2GiB", False, "fits in its place"),
        ("2GiB", True, "cannot fit"),
        ("3GiB", False, "cannot fit"),
    ],
)
def test_a_disk_that_cannot_fit_is_refused_unless_an_unused_cache_makes_room(
    tmp_path, capsys, monkeypatch, wanted, is_used, ends
):
    cache = CacheFacts(tmp_path / "a", "model", is_used, 0.0, 3 << 29, None, None, None, None)
    monkeypatch.setattr("kvbm_cli.store.caches.list_caches", lambda directory: [cache])
    blocks, free = (number // 4096 for number in SPACE)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=blocks, f_bavail=free, f_frsize=4096))
    overrides = [f"tiers.disk.directory={tmp_path}", f"tiers.disk.capacity={wanted}"]
    resolved = resolve("demo-disk", overrides=overrides)
    sizing = size_of(resolved)
    if ends == "cannot fit":
        with pytest.raises(
            EnvironmentProblem, match=f"`tiers.disk.capacity` requires .* but {tmp_path} has only 1.0 GiB free"
        ):
            require_none(list(_disk_space(resolved, sizing)))
    else:
        require_none(list(_disk_space(resolved, sizing)))
    assert ("warning: " in capsys.readouterr().err) == (ends == "fits in its place")


LONG_NAMES = {"DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": "47000000"}
LONG_VARIABLE = f"engine.environment.{'LONG_' * 12}=1"


@pytest.mark.parametrize("command", ["size -p demo", f"profile show demo --set {LONG_VARIABLE}", "profile list"])
def test_no_line_is_wider_than_80_columns(home, command):
    lines = on_a_terminal(*command.split(), home=home, columns=80, **LONG_NAMES)
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)
    assert "profile list" in command or "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS" in "\n".join(lines)


@pytest.mark.parametrize("command", ["profile check", "serve --profile"])
def test_very_many_mistakes_are_counted_and_the_first_are_shown(command, tmp_path):
    wrong = "".join(f"  key_{number}: 1\n" for number in range(600))
    (tmp_path / "mine.yaml").write_text(PROFILE.format(python="python3") + f"transfer:\n{wrong}")
    outcome = kvbm_here(*command.split(), "mine.yaml", home=tmp_path)
    assert outcome.exit_code == 2
    assert outcome.stderr.count("error: ") == 50
    assert outcome.stderr.endswith(
        "600 mistakes; 550 more are not shown: `kvbm profile check PROFILE --json` lists all\n"
    )
    everything = kvbm_here("profile", "check", "mine.yaml", "--json", home=tmp_path)
    assert len(json.loads(everything.stdout)["mistakes"]) == 600
