"""The copy of a profile that `kvbm doctor --write` makes: what was there stays, what the directory needs is added."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbm.config.load import load
from kvbm.errors import EnvironmentProblem, UsageError
from kvbm_cli.doctor.write_profile import write_profile
from kvbm_cli.package_data import profiles_directory

NEEDED = {"tiers.disk.allocator": "open-direct", "tiers.disk.o_direct": True, "tiers.disk.zerofill": True}
BLOCK = """\
# the head
engine:
  model: synthetic:tiny   # small
tiers:
  disk:
    # the drive of this node
    capacity: 1TB
    allocator: default      # as ever
    directory: "/data/a b"
  host: {capacity: 1GiB}
"""
COPY_OF_BLOCK = """\
# the head
engine:
  model: synthetic:tiny   # small
tiers:
  disk:
    # the drive of this node
    o_direct: true
    zerofill: true
    capacity: 1TB
    allocator: open-direct      # as ever
    directory: "/data/a b"
  host: {capacity: 1GiB}
"""
FLOW = "extends: ./parent.yaml\ntiers: {disk: {zerofill: false, capacity: 2TB}}   # of the node\n"
COPY_OF_FLOW = (
    "extends: {parent}\n"
    "tiers: {{disk: {{allocator: open-direct, o_direct: true, zerofill: true, capacity: 2TB}}}}   # of the node\n"
)
PARENT = "engine: {model: synthetic:tiny}\ntiers: {disk: {capacity: 1TB, directory: /data}}\n"


def written(tmp_path: Path, text: str, **how: object) -> str:
    """The text of the copy, which means what the original means, and what is needed besides."""
    (tmp_path / "parent.yaml").write_text(PARENT)
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "elsewhere").mkdir()
    resolved = load(str(tmp_path / "mine.yaml"), directories=[profiles_directory()], **how)  # type: ignore[arg-type]
    target = tmp_path / "elsewhere" / "new.yaml"
    write_profile(resolved, NEEDED, target)
    copy = load(str(target), directories=[profiles_directory()]).profile
    disk = copy.tiers.disk
    assert disk is not None
    assert {f"tiers.disk.{name}": getattr(disk, name) for name in ("allocator", "o_direct", "zerofill")} == NEEDED
    same = {"allocator": None, "o_direct": None, "zerofill": None}
    assert resolved.profile.tiers.disk is not None
    assert disk.model_copy(update=same) == resolved.profile.tiers.disk.model_copy(update=same)
    assert copy.engine == resolved.profile.engine
    return target.read_text()


def test_comments_and_order_are_kept(tmp_path: Path) -> None:
    assert written(tmp_path, BLOCK) == COPY_OF_BLOCK


def test_relative_paths_become_absolute(tmp_path: Path) -> None:
    text = BLOCK.replace("synthetic:tiny   ", "./model   ").replace("tiers:", "  python: bin/python\ntiers:", 1)
    absolute = COPY_OF_BLOCK.replace("synthetic:tiny   ", f"{tmp_path}/model   ")
    absolute = absolute.replace("tiers:", f"  python: {tmp_path}/bin/python\ntiers:", 1)
    assert written(tmp_path, text) == absolute


def test_keys_in_braces_and_a_parent_beside_the_file(tmp_path: Path) -> None:
    assert written(tmp_path, FLOW) == COPY_OF_FLOW.format(parent=tmp_path / "parent.yaml")


def test_section_of_a_parent_is_extended(tmp_path: Path) -> None:
    text = written(tmp_path, "extends: ./parent.yaml\n")
    assert text.startswith(f"extends: {tmp_path / 'mine.yaml'}\n\ntiers:\n  disk:\n    allocator: open-direct\n")


def test_list_of_parents_is_kept_or_extended(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("server: {port: 7}\n")
    text = f"extends: [demo, {tmp_path}/parent.yaml]\ntiers: {{disk: {{zerofill: false}}}}\n"
    assert written(tmp_path, text).startswith(f"extends: [demo, {tmp_path}/parent.yaml]\ntiers: {{disk: {{allocator:")
    (tmp_path / "elsewhere" / "new.yaml").unlink()
    (tmp_path / "elsewhere").rmdir()
    text = "extends: [./parent.yaml, ./more.yaml]\ntiers: {disk: {zerofill: false}}\n"
    assert written(tmp_path, text).startswith(f"extends: {tmp_path / 'mine.yaml'}\n")


def test_several_profiles_are_extended(tmp_path: Path) -> None:
    (tmp_path / "storage.yaml").write_text("tiers: {disk: {capacity: 1TB}}\n")
    files = "demo", "storage/lustre", str(tmp_path / "storage.yaml")
    resolved = load(*files, directories=[profiles_directory()])
    write_profile(resolved, NEEDED, tmp_path / "new.yaml")
    copy = load(str(tmp_path / "new.yaml"), directories=[profiles_directory()])
    assert [source.written for source in copy.extends] == list(files)
    assert {key: copy.values[key] for key in NEEDED} == NEEDED
    assert copy.profile.engine == resolved.profile.engine


def test_file_that_is_all_braces_is_extended(tmp_path: Path) -> None:
    text = "{extends: ./parent.yaml, tiers: {disk: {zerofill: false, capacity: 1TB}}}\n"
    assert written(tmp_path, text).startswith(f"extends: {tmp_path / 'mine.yaml'}\n")


def test_what_a_variable_and_the_command_line_say_is_written_too(tmp_path: Path) -> None:
    variables = {"DYN_KVBM_DISK_CACHE_GB": "0.5", "DYN_KVBM_DISK_CACHE_DIR": "/scratch: 1"}
    text = written(tmp_path, "extends: demo\n", variables=variables, overrides=["tiers.disk.threads=8"])
    assert '    capacity: 500MB\n    directory: "/scratch: 1"\n    threads: 8\n' in text


def test_variable_that_the_profile_refers_to_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE", "/data")
    (tmp_path / "mine.yaml").write_text(BLOCK.replace('"/data/a b"', '"${CACHE}"'))
    resolved = load(str(tmp_path / "mine.yaml"), directories=[], variables={"CACHE": "/data"})
    write_profile(resolved, NEEDED, tmp_path / "new.yaml")
    assert '    directory: "${CACHE}"\n' in (tmp_path / "new.yaml").read_text()


def test_profile_without_a_disk_tier(tmp_path: Path) -> None:
    resolved = load("demo", directories=[profiles_directory()])
    with pytest.raises(UsageError, match=r"has no `tiers\.disk`"):
        write_profile(resolved, NEEDED, tmp_path / "new.yaml")


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(BLOCK)
    resolved = load(str(tmp_path / "mine.yaml"), directories=[])
    with pytest.raises(EnvironmentProblem, match="no such file or directory"):
        write_profile(resolved, NEEDED, tmp_path / "none" / "new.yaml")
