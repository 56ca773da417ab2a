"""All mistakes at once: of every kind, in every layer, in order, and without those that only follow from another."""

from pathlib import Path

from kvbm.config.document import Mistake
from kvbm.config.load import Examined
from kvbm.engines.table import examine

PARENT = """\
engine:
  kind: vllm
  model: m
  arguments:
    max-model-len: 32k
    max_model_len: 16k
    port: 1
    no_enable_chunked_prefill: true
server: {prt: 8000}
transfer: {batch_blocks: 0}
"""
CHILD = """\
extends: parent
engine:
  python: ${NOWHERE}
  environment: {A-B: 1, C: true}
tiers:
  host: {capcity: 1GB}
  disk: {capacity: 100}
  object: {}
server: {port: eighty, port: 81}
onboard: !auto {}
"""
EXPECTED = """\
FILE:3 `engine.python` refers to the variable `NOWHERE`, which is not set
FILE:4 `engine.environment.A-B` must be a name of letters, digits and underscores, not the text `A-B`
FILE:4 `engine.environment.C` must be text, not a boolean: write `'true'` or `'1'`
FILE:6 unknown key `tiers.host.capcity`
FILE:7 `tiers.disk.capacity` requires a unit, such as `100GB` or `100GiB`
FILE:8 `tiers.object` is not supported in this version
FILE:9 `server.port` must be a whole number or `auto`, not the text `eighty`
FILE:9 `port` appears twice; the first is on line 9
FILE:10 YAML tags are not supported
PARENT:6 `max_model_len` and `max-model-len` are the same flag
PARENT:7 `port` is set by kvbm
PARENT:8 `no_enable_chunked_prefill` is the negated form of a flag
PARENT:9 unknown key `server.prt`
PARENT:10 `transfer.batch_blocks` must be at least 1, not `0`
DYN_KVBM_CPU_CACHE_GB `DYN_KVBM_CPU_CACHE_GB` must be a number of GB (1e9 bytes), fractions allowed, not `lots`
DYN_KVBM_CPU_CASH unknown variable `DYN_KVBM_CPU_CASH`
--set `--set` requires KEY=VALUE, not `server.port`
--set `bench.workload` must be text, not `7`
"""


def examined(directory: Path, text: str, *overrides: str, variables: dict[str, str] | None = None) -> Examined:
    (directory / "mine.yaml").write_text(text)
    path = str(directory / "mine.yaml")
    return examine(path, directories=[directory], variables=variables, overrides=overrides)


def told(directory: Path, found: Examined) -> str:
    """A line per mistake, with its place."""
    names = {str(directory / "mine.yaml"): "FILE", str(directory / "parent.yaml"): "PARENT"}
    lines = []
    for mistake in found.mistakes:
        assert isinstance(mistake, Mistake)
        line = f":{mistake.source.line}" if mistake.source is not None and mistake.source.line else ""
        lines.append(f"{names.get(mistake.file, mistake.file)}{line} {mistake.text}\n")
    return "".join(lines)


def test_every_mistake_of_every_layer_is_told_in_order(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(PARENT)
    variables = {"DYN_KVBM_CPU_CACHE_GB": "lots", "DYN_KVBM_CPU_CASH": "1"}
    found = examined(tmp_path, CHILD, "server.port", "bench.workload=7", variables=variables)
    assert told(tmp_path, found) == EXPECTED
    assert found.resolved is None


def test_what_is_right_is_known_beside_the_mistakes(tmp_path: Path) -> None:
    text = "engine: {model: m}\ntiers: {host: {blocks: 3}}\nserver: {prt: 1}\n"
    found = examined(tmp_path, text)
    assert found.resolved is not None
    assert found.resolved.values["tiers.host.blocks"] == 3


def test_mistake_behind_another_in_one_section_is_told_too(tmp_path: Path) -> None:
    text = "engine: {model: m}\ntiers: {host: {blocks: 1}}\noffload: {min_priority: 3, to_disc: always}\n"
    assert told(tmp_path, examined(tmp_path, text)) == (
        "FILE:3 `offload.min_priority` requires an engine that sends priorities, but `embedded` sends none; remove it\n"
        "FILE:3 unknown key `offload.to_disc`\n"
    )


def test_value_for_a_section_does_not_take_away_what_lies_below(tmp_path: Path) -> None:
    text = "engine: {model: m, arguments: {num_blocks: 7}}\ntiers: {host: {blocks: 1}}\n"
    found = examined(tmp_path, text, "engine.arguments=none", "engine.arguments={}")
    assert told(tmp_path, found) == ("--set `engine.arguments` must be a section with keys, not the text `none`\n")
