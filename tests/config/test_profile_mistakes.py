"""Every mistake that a profile, an override or a variable can hold, with its exact words.

They are entries of `tests/cli/snapshots/config/`: what is given, a line `-----`, and what is said of it. To add one,
write what is given; `KVBM_UPDATE_SNAPSHOTS=1` writes what is said. Lines `--set KEY=VALUE` and `NAME=VALUE` in front of
a profile are overrides and variables. Mistakes in whole commands: `tests/cli/test_mistakes.py`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from terminal import assert_said, given_in
from test_document import read_document
from test_load import BASE, load_text

from kvbm.config.connector import resolve_connector
from kvbm.engines.table import load
from kvbm.errors import ProfileError

NOTHING = "nothing"


def said(make: Callable[[], object]) -> str:
    try:
        make()
    except ProfileError as mistake:
        return mistake.message if mistake.hint is None else f"{mistake.message}\n\nhint: {mistake.hint}"
    return NOTHING


def of_profile(directory: Path, text: str) -> str:
    in_front, profile = re.fullmatch(r"((?:(?:--set |[A-Z]+=)[^\n]*\n)*)(.*)", text, re.DOTALL).groups()
    lines = in_front.splitlines()
    overrides = [line.removeprefix("--set ") for line in lines if line.startswith("--set ")]
    variables = dict(line.split("=", 1) for line in lines if not line.startswith("--set "))
    return said(lambda: load_text(directory, profile or BASE, *overrides, variables=variables))


def of_variables(directory: Path, text: str) -> str:
    variables = dict(line.split("=", 1) for line in text.splitlines())
    bare = said(lambda: resolve_connector({}, variables, engine="vllm"))
    over_a_profile = said(lambda: load_text(directory, BASE, variables=variables))
    assert bare != NOTHING
    return bare if bare == over_a_profile else f"{bare}\n\nover a profile: {over_a_profile}"


def of_connector(directory: Path, text: str) -> str:
    return said(lambda: resolve_connector(json.loads(text), {"DYN_KVBM_CPU_CACHE_GB": "1"}, engine="vllm"))


def of_yaml(directory: Path, text: str) -> str:
    return said(lambda: read_document(text, label="mine.yaml"))


def of_reference(directory: Path, text: str) -> str:
    (directory / "demo.yaml").write_text(BASE)
    (directory / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    reference = text.strip().replace("[TMP]", str(directory))
    return said(lambda: load(reference, directories=[directory]))


FILES = {
    **dict.fromkeys(("profile", "vllm", "trtllm", "interpolation", "override"), of_profile),
    "variable": of_variables,
    "yaml": of_yaml,
    "connector": of_connector,
    "reference": of_reference,
}


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in FILES for name in given_in(f"config/{file}")])
def test_mistake_is_shown_with_its_place_and_what_would_be_right(tmp_path, file, name):
    answer = FILES[file](tmp_path, given_in(f"config/{file}")[name])
    assert answer != NOTHING
    assert_said(f"config/{file}", name, answer.replace(str(tmp_path), "[TMP]"))
