"""Mutated profiles, variables and command lines, and the judge of what the command makes of them.

    python tests/cli/fuzz.py 0 20000        runs the cases 0 to 19999, and prints what is wrong with which
    python tests/cli/fuzz.py 7 8 --show     one case: its files, its command line and what is said

A case is a function of the seed and its number. The judge wants of every case: no traceback, an exit code that the
documentation has, an error that says where; and of one that passes, that nothing was ignored: each key of the file,
each variable and each `--set` is in `kvbm profile show` with its value and its origin, or with that of a layer above.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import random
import re
import shlex
import string
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import typer
import yaml

sys.path.append(str(Path(__file__).parents[1]))

from terminal import environment, kvbm_here

from kvbm.config.engine import ENGINE_KINDS
from kvbm.config.key_list import keys
from kvbm.config.layers import shipped
from kvbm.config.schema import INTERPOLATED
from kvbm.config.sizes import parse_size
from kvbm.config.variables import STORE_VARIABLES, VARIABLES
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.text import profile_text

SEED = 5
CASES = 20_000
EXIT_CODES = {0, 1, 2}  # of commands that start no engine
SLOW_S = 2.0
NAME = "mine.yaml"
OUTSIDE = {"WHERE": "/srv/kvbm", "EMPTY": "", "PORT": "8000"}

KEYS = {key.path: key for kind in ENGINE_KINDS for key in keys(engine=kind)}
LEAVES = {kind: [key.path for key in keys(engine=kind) if not key.is_section] for kind in ENGINE_KINDS}
SECTIONS = [path for path, key in KEYS.items() if key.is_section]
TEXTS = (
    *("", "x", "auto", "yes", "on", "null", "~", "0", "-1", "1", "2", "1.5", "1e9", "1e999", "nan", ".inf", "0x10"),
    *("64GiB", "1.5 GB", "100", "1KB", "9999TB", "1Gib", "32k", "32K", "true", "False", "TRUE", "8000", "65536", "[a]"),
    *("{a: 1}", "[1", "'1'", '"x"', "demo", "vllm", "embedded", "sglang", "synthetic:tiny", "synthetic:tinny", "a:b"),
    *("${WHERE}", "${EMPTY}", "${NONE}", "${NONE:-y}", "$WHERE", "${", "$${WHERE}", "/srv", "~/x", "../x", "é", "\x07"),
    *("127.0.0.1", "::1", "0.0.0.0", "-v", "--help", "%s", "{}", "a=b", "\u2028", "x" * 5000, "9" * 40),
)
PLAIN: tuple[object, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 2**40, 2**70, 0.5, -0.0, 1e300, [], {}, [1, "a"], {"a": 1}),
)


@dataclass
class Case:
    """A file, variables and a command line; `sets` are the texts of `--set` in it."""

    number: int
    contents: bytes
    variables: dict[str, str]
    arguments: list[str]
    sets: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Said:
    exit_code: int
    stdout: str
    stderr: str
    seconds: float


def bases() -> list[bytes]:
    """The profiles that ship, two that say every key, and a few small ones."""
    directory = profiles_directory()
    texts = [(directory / f"{name}.yaml").read_text() for name in shipped([directory])]
    for kind, model in (("embedded", "synthetic:tiny"), ("vllm", "synthetic:vllm-25m")):
        values = {
            "engine": {"kind": kind, "model": model},
            "tiers": {"host": {"blocks": 64}, "disk": {"capacity": "1GiB"}},
        }
        lines = profile_text(values, engine=kind).splitlines()
        offers = [re.sub(r"^( *)#(?! )(.*)", r"\1\2", line) for line in lines if "  #" not in line.strip()]
        texts.append("\n".join(line for line in offers if not line.lstrip().startswith("#")) + "\n")
    small = "tiers: {host: {capacity: 64MiB}}\n"
    texts.append("engine: {model: synthetic:tiny, environment: {A: '${WHERE}', B: 1}}\n" + small)
    texts.append("extends: demo\ntiers:\n  disk: {capacity: 1GiB, directory: '${WHERE:-~/kv}'}\n")
    texts.append("extends: vllm\nengine: {arguments: {max-num-seqs: 8, hf_overrides: {a: [1, {b: c}]}}}\n")
    return [text.encode() for text in texts]


BASES = bases()
GET_COMMAND = functools.cache(typer.main.get_command)  # what takes longest, and is the same for every case


def make_case(number: int, *, seed: int = SEED) -> Case:
    dice = random.Random(f"{seed}:{number}")
    contents = dice.choice(BASES)
    how = dice.random()
    kind = "vllm" if b"vllm" in contents else "embedded"
    if how < 0.55:
        contents = by_structure(dice, contents, kind)
    elif how < 0.75:
        contents = by_bytes(dice, contents)
    variables = mutated_variables(dice) if dice.random() < 0.3 else {}
    sets = [mutated_set(dice, kind) for _ in range(dice.choice((0, 0, 0, 1, 1, 2)))]
    return Case(number, contents, variables, command_line(dice, sets), sets)


def by_structure(dice: random.Random, contents: bytes, kind: str) -> bytes:
    tree = yaml.load(contents, Loader=yaml.BaseLoader)
    for _ in range(dice.choice((1, 1, 1, 1, 2, 3))):
        mutate(dice, tree, LEAVES[kind])
    text: str = yaml.dump(tree, sort_keys=dice.random() < 0.3, default_flow_style=dice.choice((None, False, True)))
    return unquoted(text).encode()


def unquoted(text: str) -> str:
    """Quotes that the dumper put around numbers and booleans, because the tree has only text, go away."""
    return re.sub(r"'([^'\n]{0,40})'", lambda found: found[1] if is_plain(found[1]) else found[0], text)


def is_plain(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9./+-]*", text) is not None and not text.startswith("-")


def mutate(dice: random.Random, tree: dict, paths: Sequence[str]) -> None:
    section, name = dice.choice(list(places(tree)))
    change = dice.choice((0, 0, 1, 2, 3, 4, 5, *[6] * 8, 9, 10))
    if change == 0:
        del section[name]
    elif change == 1:
        section[misspelt(dice, name)] = section.pop(name)
    elif change == 2:
        target, _ = dice.choice(list(places(tree)))
        target[name] = copy.deepcopy(section[name])
    elif change in (3, 4):
        section[name] = value(dice)
    elif change == 5:
        section[dice.choice(paths).rpartition(".")[2]] = value(dice)
    elif change == 6:
        put(tree, (path := dice.choice(paths)).split("."), value_of(dice, path))
    elif change == 9:
        put(tree, dice.choice([*SECTIONS, "filters", "tiers.object", "zzz", "extends"]).split("."), value(dice))
    else:
        section[name] = [section[name]] if dice.random() < 0.5 else {name: section[name]}


def places(tree: dict) -> Iterator[tuple[dict, str]]:
    """Every section with each of its keys; one of the root's own if that is empty."""
    if not tree:
        tree["description"] = "x"
    for name, inside in tree.items():
        yield tree, name
        if isinstance(inside, dict) and inside:
            yield from places(inside)


def put(tree: dict, names: Sequence[str], inside: object) -> None:
    for name in names[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[names[-1]] = inside


def misspelt(dice: random.Random, name: str) -> str:
    at = dice.randrange(len(name) + 1)
    letter = dice.choice(string.ascii_lowercase + "_-. $")
    return (
        dice.choice((name[:at] + letter + name[at:], name[:at] + name[at + 1 :], name[:at] + letter + name[at + 1 :]))
        or "x"
    )


def value(dice: random.Random) -> object:
    return dice.choice(PLAIN) if dice.random() < 0.3 else dice.choice(TEXTS)


def value_of(dice: random.Random, path: str) -> object:
    """Most of the time a value that the key can have."""
    key = KEYS.get(path)
    if key is None or dice.random() < 0.2:
        return value(dice)
    if key.kind.startswith("`"):
        return dice.choice(re.findall("`([^`]*)`", key.kind))
    return dice.choice(RIGHT.get(key.kind, ("1",)))


RIGHT: dict[str, tuple[object, ...]] = {
    "size, or `auto`": ("64GiB", "1.5 GB", "2000MB", "1TB", "auto"),
    "true or false": (True, False),
    "number": (1, 2.5, 30),
    "whole number": (1, 2, 64),
    "port": (0, 8001, "auto"),
    "text": ("x", "/srv", "${WHERE:-x}", "127.0.0.1", "~/x"),
    "names to text": ({"A": 1}, {"B": "${WHERE}", "C": "x"}, {}),
    "name or names": ("a", ["a", "b"]),
    "mapping": ({"kv_role": "kv_both"}, {}),
    "section": (None, {}),
}
RIGHT["whole number or such as `32k`"] = RIGHT["whole number, such as `32k`, or `auto`"] = ("32k", 4096)


def by_bytes(dice: random.Random, contents: bytes) -> bytes:
    text = bytearray(contents)
    for _ in range(dice.choice((1, 1, 2, 4, 16))):
        at = dice.randrange(len(text) + 1)
        change = dice.randrange(6)
        if change == 0:
            text[at : at + dice.randint(1, 8)] = b""
        elif change == 1:
            text[at:at] = bytes([dice.choice(b" \n\t:#{}[]'\"|>-?&*!%@`~$,\\\0\xff\xc3\x7f")])
        elif change == 2:
            text[at:at] = dice.choice(TEXTS).encode()
        elif change == 3 and text:
            text[at % len(text)] ^= 1 << dice.randrange(8)
        elif change == 4:
            text[at:at] = text[at : at + dice.randint(1, 80)]
        else:
            del text[at:]
    return bytes(text)


RIGHT_BY_FORM = {
    "GIGABYTES": ("4", "0.5", "16"),
    "COUNT": ("1", "16", "100", "0"),
    "BOOLEAN": ("true", "0", "off", "1"),
    "BUCKET": ("kv-cache", "b2"),
    "ENDPOINT": ("http://127.0.0.1:9000", "https://s3.example"),
}


def mutated_variables(dice: random.Random) -> dict[str, str]:
    named = {}
    for _ in range(dice.choice((1, 1, 2, 3))):
        variable = dice.choice(VARIABLES)
        name, text = variable.name.replace("<NAME>", "X"), dice.choice(TEXTS)
        if dice.random() < 0.75:
            text = dice.choice(RIGHT_BY_FORM.get(variable.form.name, ("default", "/srv/kv")))
        if dice.random() < 0.1:
            name = misspelt(dice, name)
        if name and "=" not in name and "\0" not in name:
            named[name] = text
    return named


def mutated_set(dice: random.Random, kind: str) -> str:
    path = dice.choice(
        [*LEAVES[kind], *LEAVES[kind], *SECTIONS, "engine.environment.A", "engine.arguments.enforce_eager", "extends"]
    )
    if dice.random() < 0.2:
        path = misspelt(dice, path)
    text = str(value_of(dice, path))
    return f"{path}={text.lower() if text in ('True', 'False') else text}" if dice.random() < 0.95 else path


COMMANDS = (
    *("profile show", "profile show", "profile check", "profile check --json", "profile diff demo", "size", "serve"),
)


def command_line(dice: random.Random, sets: Sequence[str]) -> list[str]:
    command = dice.choice(COMMANDS)
    words = command.split()
    words += ["-p", NAME] if command in ("serve", "size") else [NAME]
    for text in sets:
        words += ["--set", text]
    if dice.random() < 0.06:
        at = dice.randrange(len(words))
        words[at : at + 1] = dice.choice(([], [misspelt(dice, words[at])], [words[at]] * 2, [dice.choice(TEXTS)]))
    return ["serve", "--dry-run", *words[1:]] if words[:1] == ["serve"] else words  # nothing is to be started


def variables_of(case: Case, home: Path) -> dict[str, str]:
    return environment(home, **{**OUTSIDE, **case.variables})


def said(case: Case, home: Path, *arguments: str) -> Said:
    """What the command says of the case; other arguments replace its own."""
    begin = time.process_time()
    with mock.patch("typer.main.get_command", GET_COMMAND):
        outcome = kvbm_here(*(arguments or case.arguments), home=home, **variables_of(case, home))
    return Said(outcome.exit_code, outcome.stdout, outcome.stderr, time.process_time() - begin)


def judge(case: Case, home: Path) -> tuple[int, list[str]]:
    """The exit code, and what is wrong with what the command makes of the case; nothing, if all is well."""
    (home / NAME).write_bytes(case.contents)
    result = said(case, home)
    wrong = [*manners(case, result)]
    words = case.arguments
    sets = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--set"]
    if result.exit_code == 0 and NAME in words and "--help" not in words and sets == case.sets:
        shown = said(case, home, "profile", "show", NAME, "--json", *(f"--set={text}" for text in sets))
        with mock.patch.dict(os.environ, variables_of(case, home), clear=True):
            wrong += nothing_ignored(case, shown)
    left = {path.name for path in home.iterdir()} - {NAME}
    return result.exit_code, [*wrong, *(f"{name} stays behind" for name in left)]


def manners(case: Case, result: Said) -> Iterator[str]:
    if result.exit_code not in EXIT_CODES:
        yield f"exit code {result.exit_code}"
    for word in ("Traceback", "a bug in kvbm", "is not valid: ", "None of", "pydantic"):
        if word in result.stderr:
            yield f"says {word!r}"
    is_verdict = "diff" in case.arguments and result.exit_code == 1 and not result.stderr.startswith("error:")
    as_json = "--json" in case.arguments and result.stdout.startswith("{")
    if result.exit_code and not is_verdict and not as_json and "error: " not in result.stderr:
        yield "fails without an error"
    if as_json and result.exit_code and not json.loads(result.stdout)["mistakes"]:
        yield "fails without a mistake"
    if not result.exit_code and "error: " in result.stderr:
        yield "an error that is none"
    if result.exit_code == 2 and not as_json and not _says_where(case, result.stderr):
        yield "an error without a place"
    if result.seconds > SLOW_S:
        yield f"takes {result.seconds:.1f} s"


def _says_where(case: Case, text: str) -> bool:
    places = (NAME, "--set", "profiles/", *case.variables, *case.arguments)
    usage = ("no such option", "no such command", "argument", "missing", "no profile is named", "`kvbm ")
    return any(place and place in text for place in (*places, *usage))


def nothing_ignored(case: Case, shown: Said) -> Iterator[str]:
    if shown.exit_code != 0:
        yield f"passes, and `profile show` does not: {shown.stderr[:200]}"
        return
    every = json.loads(shown.stdout)
    for path, node in leaves(yaml.compose(case.contents.decode("utf-8-sig"), Loader=yaml.BaseLoader), ()):
        yield from _is_shown(path, node, every, case)
    last = {text.partition("=")[0].strip(): text.partition("=")[2] for text in case.sets}
    for key, text in last.items():
        yield from _set_is_shown(key, text, every, last)
    for name, text in case.variables.items():
        yield from _variable_is_shown(name, text, every, shown.stderr, last)


def leaves(node: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], yaml.Node]]:
    """Every key with its value down to the keys of the schema, whose own mappings are values."""
    key = ".".join(path)
    below = key in SECTIONS or key in ("", "engine.environment")
    if isinstance(node, yaml.MappingNode) and below:
        for name, inside in node.value:
            yield from leaves(inside, (*path, spelled(path, name.value)))
    elif node is not None:
        yield path, node


def spelled(path: tuple[str, ...], name: str) -> str:
    return name.replace("-", "_") if path == ("engine", "arguments") else name


def _is_shown(path: tuple[str, ...], node: yaml.Node, every: Mapping, case: Case) -> Iterator[str]:
    key = ".".join(path)
    if key in SECTIONS or key == "engine.environment":  # empty, or null
        if key.startswith("tiers.") and says_null(node) and key not in every and not _is_above(key, every, case):
            yield f"{key} is null, and there all the same"
        return
    entry = every.get(key)
    if entry is None:
        if not _is_above(key, every, case):
            yield f"{key} is not shown"
    elif entry["origin"].startswith(("--", "DYN_", "ENABLE_KVBM_")):
        return
    elif not entry["origin"].startswith(NAME):
        if not _capacity_won(key, every):
            yield f"{key} comes from {entry['origin']}"
    elif not same(node, entry["value"], key):
        yield f"{key} is shown as {entry['value']!r}"


def _is_above(key: str, every: Mapping, case: Case) -> bool:
    """Whether an override has taken a section away that the key was in, or has put one there."""
    names = key.split(".")
    above = [".".join(names[:depth]) for depth in range(1, len(names) + 1)]
    assignments = [*case.sets, *(f"{variable.key}=" for variable in VARIABLES if variable.name in case.variables)]
    return any(text.startswith((f"{one}=", f"{one}.", f"{one} ")) for text in assignments for one in above[1:])


def _capacity_won(key: str, every: Mapping) -> bool:
    """A later layer's `capacity` takes the `blocks` of an earlier one away."""
    section, _, name = key.rpartition(".")
    capacity = every.get(f"{section}.capacity")
    return name == "blocks" and capacity is not None and capacity["origin"].startswith(("--", "DYN_"))


def says_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("null", "~", "Null", "NULL")


def same(node: yaml.Node, shown: object, key: str) -> bool:
    """Whether the value that was written is the one that is shown."""
    if isinstance(node, yaml.MappingNode):
        is_mapping = isinstance(shown, dict)
        return is_mapping and all(name.value in shown and same(one, shown[name.value], key) for name, one in node.value)
    if isinstance(node, yaml.SequenceNode):
        is_list = isinstance(shown, list) and len(shown) == len(node.value)
        return is_list and all(same(one, other, key) for one, other in zip(node.value, shown, strict=True))
    assert isinstance(node, yaml.ScalarNode)
    return same_scalar(node.value, shown, key, is_quoted=node.style is not None)


def same_scalar(text: str, shown: object, key: str, *, is_quoted: bool) -> bool:
    if shown is None:
        return not is_quoted and text.strip() in ("", "null", "~", "Null", "NULL")
    if isinstance(shown, bool):
        return text.lower() == str(shown).lower()
    if isinstance(shown, int | float):
        return text == "auto" if shown == 0 and key.endswith("port") and text == "auto" else float(text) == shown
    if key.endswith("capacity") and text != "auto":
        return parse_size(text) == parse_size(str(shown))
    return str(shown) in (text, replaced(text, key), number_text(text))


def number_text(text: str) -> str | None:
    """A variable of the environment may be written as a number."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return str(kind(text))
    return None


def replaced(text: str, key: str) -> str:
    if not any(key == one or key.startswith(f"{one}.") for one in INTERPOLATED):
        return text.replace("$${", "${")
    pieces = text.split("$$")
    return "$".join(re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", _variable, piece) for piece in pieces)


def _variable(found: re.Match[str]) -> str:
    value = os.environ.get(found[1])
    return value if found[2] is None and value is not None else value or found[2] or ""


def _set_is_shown(key: str, text: str, every: Mapping, sets: Mapping[str, str]) -> Iterator[str]:
    names = key.split(".")
    key = ".".join(spelled(tuple(names[:depth]), name) for depth, name in enumerate(names))
    if key in SECTIONS or key == "engine.environment" or text[:1] in ("{", "["):
        return  # a mapping or nothing; what it says is checked where it says it
    entry = every.get(key) or _inside_a_flag(names, every)
    if entry is None:
        if not any(key.startswith(f"{other}.") or key == other for other in sets if other in SECTIONS):
            yield f"--set {key} is not shown"
    elif not entry["origin"].startswith("--set"):
        if not _capacity_won(key, every):
            yield f"--set {key} is ignored for {entry['origin']}"
    elif entry["origin"].startswith("--set") and not same_scalar(
        bare(text), entry["value"], key, is_quoted=bare(text) != text.strip()
    ):
        yield f"--set {key}={text!r} is shown as {entry['value']!r}"


def _inside_a_flag(names: Sequence[str], every: Mapping) -> Mapping | None:
    """What lies in the mapping that is the value of a flag, with the origin of the flag."""
    flag = every.get(".".join([*names[:2], spelled(tuple(names[:2]), names[2])])) if len(names) > 3 else None
    value = flag["value"] if flag is not None else None
    for name in names[3:]:
        value = value.get(name) if isinstance(value, dict) else None
    return {"value": value, "origin": flag["origin"]} if flag is not None and value is not None else None


def bare(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def _variable_is_shown(name: str, text: str, every: Mapping, stderr: str, sets: Mapping[str, str]) -> Iterator[str]:
    store = str(every.get("tiers.shared.url", {"value": ""})["value"])
    if not name.startswith("DYN_KVBM_") or f"`{name}` has no effect" in stderr:
        return
    if name in STORE_VARIABLES and store.startswith("s3://"):
        return  # the store reads it
    key = next((variable.key for variable in VARIABLES if variable.name == name), None)
    is_used = any(entry["origin"] == name for entry in every.values())
    asks_for_nothing = text.strip().lower() in ("0", "false", "no", "off")
    is_overridden = key is not None and any(key == one or key.startswith(f"{one}.") for one in sets)
    other = "blocks" if key is not None and key.endswith("capacity") else "capacity"
    loses = key is not None and f"{key.rpartition('.')[0]}.{other}" in sets
    if not (is_used or asks_for_nothing or is_overridden or loses):
        yield f"{name}={text!r} is ignored"


@dataclass
class Tally:
    """What came of many cases: how many ended with which exit code, and what was wrong with which."""

    exit_codes: Counter[int] = field(default_factory=Counter)
    wrong: dict[int, list[str]] = field(default_factory=dict)


def run_cases(numbers: Sequence[int], *, seed: int = SEED) -> Tally:
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="kvbm-fuzz-") as directory:
        for number in numbers:
            case = make_case(number, seed=seed)
            try:
                exit_code, wrong = judge(case, Path(directory))
            except Exception as error:
                exit_code, wrong = -1, [f"raises {type(error).__name__}: {error}"]
            tally.exit_codes[exit_code] += 1
            if wrong:
                tally.wrong[number] = wrong
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("begin", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    numbers = range(options.begin, options.end)
    for number in numbers if options.show else ():
        show(make_case(number, seed=options.seed))
    tally = run_cases(numbers, seed=options.seed)
    for number, wrong in list(tally.wrong.items())[:40]:
        print(f"{number}: {'; '.join(wrong)}")
    print(f"{len(tally.wrong)} of {len(numbers)} cases are wrong; exit codes {dict(sorted(tally.exit_codes.items()))}")
    return 1 if tally.wrong else 0


def show(case: Case) -> None:
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in case.variables.items())
    print(f"case {case.number}\n{case.contents.decode(errors='backslashreplace')}")
    print(f"$ {variables} kvbm {shlex.join(case.arguments)}")
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, NAME).write_bytes(case.contents)
        result = said(case, Path(directory))
    print(f"exit code {result.exit_code}\n{result.stdout}{result.stderr}")


if __name__ == "__main__":
    sys.exit(main())
