"""The JSON Schema: what it lets pass and what it underlines, compared with what `load` says."""

from pathlib import Path

import pytest
import yaml

from kvbm.config.document import parse_document, plain_values
from kvbm.config.key_list import keys
from kvbm.config.layers import shipped, shipped_halves
from kvbm.engines.table import load
from kvbm.errors import ProfileError
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.schema import json_schema

jsonschema = pytest.importorskip("jsonschema")
VALIDATOR = jsonschema.Draft7Validator(json_schema())
DIRECTORIES = [profiles_directory()]
RIGHT = {
    "size and blocks": "engine: {model: m}\ntiers: {host: {capacity: 1.5 gib, blocks: 3}}\n",
    "automatic port": "engine: {model: m}\ntiers: {host: {blocks: 1}}\nserver: {port: auto}\n",
    "kind of the parent": "extends: vllm\nengine: {arguments: {enforce_eager: true, max_model_len: 32k}}\n",
    "nothing but a parent": "extends: demo\n",
    "empty sections": "extends: demo-disk\nserver:\ntiers:\n  disk: null\n",
    "key that is not set": "extends: demo\nbench: {workload: null}\n",
    "names": "engine: {kind: vllm, model: m, arguments: {served_model_name: [a, b]}}\ntiers: {disk: {blocks: 1}}\n",
    "environment": "engine: {model: '${HOME}', environment: {A: 1, B: '${HOME}'}}\ntiers: {host: {blocks: 1}}\n",
}
WRONG = {
    "misspelt key": "engine: {model: m}\ntiers: {host: {capcity: 1GB}}\n",
    "misspelt flag": "engine: {model: m, arguments: {num_block: 5}}\ntiers: {host: {blocks: 1}}\n",
    "size without unit": "engine: {model: m}\ntiers: {host: {capacity: 100}}\n",
    "size that is none": "engine: {model: m}\ntiers: {host: {capacity: much}}\n",
    "boolean that is text": "extends: demo\noffload: {generated: 'on'}\n",
    "port too large": "extends: demo\nserver: {port: 65536}\n",
    "choice that is none": "extends: demo-disk\ntiers: {disk: {io: uring}}\n",
    "engine that is none": "engine: {kind: vlm, model: m}\ntiers: {host: {blocks: 1}}\n",
    "no model": "engine: {kind: vllm}\ntiers: {host: {blocks: 1}}\n",
    "no engine and no tier": "server: {port: 7}\n",
    "object tier": "extends: demo\ntiers: {object: {bucket: b}}\n",
    "flag without a value": "extends: vllm\nengine: {kind: vllm, arguments: {enforce_eager: null}}\n",
    "variable of a number": "extends: demo\nserver: {port: '${PORT}'}\n",
    "extends a number": "extends: 5\n",
}


def plain(text: str) -> object:
    document, mistakes = parse_document(text, label="f")
    assert not mistakes
    return plain_values(document)


def load_text(directory: Path, text: str) -> None:
    (directory / "mine.yaml").write_text(text)
    load(str(directory / "mine.yaml"), directories=DIRECTORIES, variables={"HOME": "/root"})


def test_it_is_a_schema() -> None:
    jsonschema.Draft7Validator.check_schema(json_schema())


@pytest.mark.parametrize("name", [*shipped(DIRECTORIES), *shipped_halves(DIRECTORIES)])
def test_shipped_profile_passes(name: str) -> None:
    VALIDATOR.validate(yaml.safe_load((profiles_directory() / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(tmp_path: Path, name: str) -> None:
    load_text(tmp_path, RIGHT[name])
    VALIDATOR.validate(plain(RIGHT[name]))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_underlined(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProfileError):
        load_text(tmp_path, WRONG[name])
    assert not VALIDATOR.is_valid(plain(WRONG[name]))


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_every_key_is_in_it_with_its_description(engine: str) -> None:
    for key in keys(engine=engine):
        schema = at(json_schema(), key.path, engine)
        assert schema["description"] == key.description, key.path


def at(schema: dict, path: str, engine: str) -> dict:
    """The schema of the key at `path`."""
    holder = schema
    for name in path.split("."):
        names = [one["$ref"].rpartition("/")[2] for one in holder.get("anyOf", ()) if "$ref" in one]
        matching = [one for one in names if len(names) == 1 or one.lower().startswith(engine)]
        holder = schema["definitions"][matching[0]] if matching else holder
        holder = holder["properties"][name]
    return holder
