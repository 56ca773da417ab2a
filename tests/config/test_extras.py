"""The extras of pyproject.toml name the tested versions of the engines."""

from __future__ import annotations

import tomllib
from pathlib import Path

from kvbm.engines.installation import requirement
from kvbm.engines.sglang.versions import INSTALL as INSTALL_SGLANG
from kvbm.engines.sglang.versions import TESTED
from kvbm.engines.trtllm.versions import CONTRACT_TESTED
from kvbm.engines.trtllm.versions import INSTALL as INSTALL_TRTLLM
from kvbm.engines.vllm.versions import INSTALL, RUN

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_extras_are_the_tested_versions_of_the_engines() -> None:
    extras = PROJECT["optional-dependencies"]
    assert extras["vllm"] == [f"vllm{requirement(RUN)}"]
    assert extras["sglang"] == [f"sglang=={version}" for version in TESTED]
    assert extras["tensorrt-llm"] == [f"tensorrt-llm{requirement(CONTRACT_TESTED)}"]


def test_hints_name_extras_that_exist() -> None:
    for extra, command in (("vllm", INSTALL), ("tensorrt-llm", INSTALL_TRTLLM), ("sglang", INSTALL_SGLANG)):
        assert command == f"pip install '{PROJECT['name']}[{extra}]'"
        assert extra in PROJECT["optional-dependencies"]
