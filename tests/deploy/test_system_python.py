"""The README's line that installs the wheel into the system's Python of an image keeps every package that is there.

The Python of these tests is outside any environment and belongs to the system (PEP 668). Its packages, those that pip
may add, and kvbm's wheel are stand-ins with the real requirements. Nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

pip = pytest.importorskip("pip")
ROOT = Path(__file__).resolve().parents[2]
LINE = re.search(r"^\$ (python3 -m pip list .*\n.*\.whl)$", (ROOT / "README.md").read_text(), re.MULTILINE)[1]
REQUIRED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
LEAST = dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in REQUIRED)
MISSING = "xxhash"
INSTALLED = {name: version for name, version in LEAST.items() if name != MISSING} | {
    "torch": "2.11.0+cu130",
    "vllm": "0.32.0",
}


def write_wheel(folder, name, version, requires=()):
    """Write a wheel that has requirements and no code."""
    stem = f"{name.replace('-', '_')}-{version}"
    head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        requirements = [f"Requires-Dist: {line}" for line in requires]
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join([*head, *requirements, ""]))
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")


class SystemPython:
    """A Python with links to the library of this one and packages of its own; `index` has later ones."""

    def __init__(self, root: Path) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        packages = root / "lib" / library.name / "site-packages"
        packages.mkdir(parents=True)
        for entry in {*library.iterdir()} - {library / "site-packages", library / "EXTERNALLY-MANAGED"}:
            (packages.parent / entry.name).symlink_to(entry)
        (packages.parent / "EXTERNALLY-MANAGED").write_text("[externally-managed]\nError=apt manages these packages\n")
        for entry in Path(pip.__file__).parents[1].glob("pip*"):
            (packages / entry.name).symlink_to(entry)
        (root / "bin").mkdir()
        shutil.copy(os.path.realpath(sys.executable), root / "bin" / "python3")
        self.root, self.index = root, root / "index"
        self.index.mkdir()
        for name, version in LEAST.items():
            write_wheel(self.index, name, f"{version}.1")
        write_wheel(root, "kvbm-cli", "0.1.0", REQUIRED)

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
        }
        return subprocess.run(["sh", "-c", line], cwd=self.root, env=variables, capture_output=True, text=True)

    def install(self, packages: dict[str, str]) -> None:
        image = self.root / "image"
        image.mkdir()
        for name, version in packages.items():
            write_wheel(image, name, version)
        done = self.run(f"python3 -m pip install --break-system-packages {image}/*.whl")
        assert done.returncode == 0, done.stderr

    def packages(self) -> set[str]:
        return set(self.run("python3 -m pip list --format=freeze").stdout.split())


@pytest.fixture
def system(tmp_path):
    return SystemPython(tmp_path)


def test_the_line_adds_what_is_missing_and_changes_nothing(system):
    system.install(INSTALLED)
    before = system.packages()
    assert "torch==2.11.0+cu130" in before
    done = system.run(LINE)
    assert done.returncode == 0, done.stderr
    assert system.packages() == before | {"kvbm-cli==0.1.0", f"{MISSING}=={LEAST[MISSING]}.1"}


def test_the_line_fails_and_changes_nothing_if_a_package_is_too_old(system):
    system.install(INSTALLED | {"rich": "12.0"})
    before = system.packages()
    done = system.run(LINE)
    assert done.returncode != 0
    assert "rich==12.0" in done.stdout + done.stderr
    assert system.packages() == before


def test_such_a_python_refuses_an_installation_without_the_option(system):
    done = system.run("python3 -m pip install kvbm_cli-*.whl")
    assert (done.returncode, "apt manages these packages" in done.stderr) == (1, True)
