"""Installs kvbm into the Python of a base image without changing what the base image has.

Every installed package is a constraint for pip, so that torch, vLLM and their dependencies keep their versions; only
what is missing is added. The packages in MAY_CHANGE belong to command lines, not to engines, and may be replaced if
kvbm requires another version. If another package has changed, or pip finds no solution, the build of the image fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

MAY_CHANGE = frozenset({"click", "kvbm-cli", "rich", "typer"})
LIST_VERSIONS = "import install; print(*map('=='.join, sorted(install.versions().items())), sep='\\n')"


def versions() -> dict[str, str]:
    """Return the version of each installed package by its normalised name."""
    return {re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(): one.version for one in distributions()}


def versions_now() -> dict[str, str]:
    """Return the versions as a new interpreter finds them, because this one may have old results."""
    command = [sys.executable, "-c", LIST_VERSIONS]
    listed = subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True).stdout
    return dict(line.split("==", 1) for line in listed.split())


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return a line for each package of `before` that is gone or has another version, except those that may change."""
    return [
        f"{name} {version} -> {after.get(name, 'removed')}"
        for name, version in sorted(before.items())
        if name not in MAY_CHANGE and after.get(name) != version
    ]


def install(wheel: Path, extras: str) -> None:
    """Install the wheel. Raises SystemExit if pip fails or a package of the base image has changed."""
    before = versions_now()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in before.items() if name not in MAY_CHANGE)
        constraints.flush()
        requirement = f"{wheel.resolve()}[{extras}]" if extras else str(wheel.resolve())
        pip = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "-c", constraints.name, requirement]
        if code := subprocess.run(pip, env={**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1"}).returncode:
            raise SystemExit(code)
    if changed := changes(before, versions_now()):
        raise SystemExit("error: the installation changed packages of the base image: " + ", ".join(changed))


def main() -> None:
    parser = argparse.ArgumentParser(description="Install a wheel of kvbm and keep the packages of the base image.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", default="", help="extras of kvbm-cli, separated by commas")
    options = parser.parse_args()
    install(options.wheel, options.extras)


if __name__ == "__main__":
    main()
