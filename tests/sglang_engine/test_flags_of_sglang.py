"""What `kvbm profile import` and `check` know of SGLang's flags fits its own parser. `nox -s sglang` runs it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import metadata

import pytest

from kvbm.config.engine import SglangArguments
from kvbm.engines.sglang.options import similar_flag
from kvbm_cli.profile.import_launch import names_of, value_count

try:
    metadata.version("sglang")
except metadata.PackageNotFoundError:
    pytest.skip("requires SGLang: `nox -s sglang`", allow_module_level=True)

# In a process of its own, because the stand-ins for its kernels stay. Prints each flag, its entry and its nargs.
PARSER = """
import argparse, json
from kvbm.engines.sglang import cpu_server
cpu_server.prepare()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
flags = [(flag[2:].replace("-", "_"), one.dest, one.nargs) for one in parser._actions for flag in one.option_strings]
print(json.dumps(flags))
"""


def counted(nargs: int | str | None) -> int:
    if nargs == 0:
        return 0
    return 1 if nargs in (None, argparse.OPTIONAL) else sys.maxsize


@pytest.fixture(scope="module")
def flags():
    done = subprocess.run([sys.executable, "-c", PARSER], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_flag_has_the_entry_and_the_number_of_values_of_the_parser(flags):
    assert len(flags) > 500
    assert [(name, nargs) for name, _, nargs in flags if value_count(name, "sglang") != counted(nargs)] == []
    others = {name: entry for name, entry, _ in flags if name not in (entry, f"no_{entry}", "model")}
    assert {name: names_of("sglang").get(name, name) for name in others} == others


def test_no_flag_of_the_parser_is_taken_for_a_misspelt_one(flags):
    declared = SglangArguments.model_fields
    assert {name: near for name, *_ in flags if name not in declared and (near := similar_flag(name))} == {}
