"""Completion in a shell: the names that are completed beside the commands'. How they reach it: completion_shells.py.

A script asks the command itself, with _KVBM_COMPLETE in its environment, each time that Tab is pressed; so everything
here is quick and says nothing when it fails: there is no place for an error in the middle of a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.errors import UsageError
from kvbm_cli.terminal.completion_shells import FILES, answer_shells, script
from kvbm_cli.terminal.console import print_data

if TYPE_CHECKING:
    from kvbm.config.schema import Key

SHELLS = ("bash", "zsh", "fish")


def print_script(shell: str, variable: str) -> None:
    """UsageError for a shell that is none of SHELLS."""
    if shell not in SHELLS:
        known = ", ".join(f"`{one}`" for one in SHELLS)
        raise UsageError(f"there is no completion for `{shell}`", hint=f"there are {known}")
    print_data(script(shell, variable))


def prepare() -> None:
    """Makes known to the parser what answers a shell."""
    answer_shells()


def shells(incomplete: str) -> list[str]:
    return _beginning(SHELLS, incomplete)


def files(incomplete: str) -> list[tuple[str, str]]:
    """The shell knows them."""
    return [(incomplete, FILES)]


def profiles(incomplete: str) -> list[str] | list[tuple[str, str]]:
    """Names of the shipped ones, and files where none begins so."""
    from kvbm_cli.package_data import profiles_directory

    return _names_in(profiles_directory(), incomplete) or files(incomplete)


def compared(incomplete: str) -> list[str] | list[tuple[str, str]]:
    """What `kvbm bench --compare` takes."""
    from kvbm_cli.bench.comparison import BASELINE
    from kvbm_cli.package_data import profiles_directory

    names = [*_beginning([BASELINE], incomplete), *_names_in(profiles_directory(), incomplete)]
    return names or files(incomplete)


def workloads(incomplete: str) -> list[str] | list[tuple[str, str]]:
    from kvbm_cli.package_data import workloads_directory

    return _names_in(workloads_directory(), incomplete) or files(incomplete)


def engines(incomplete: str) -> list[str]:
    from kvbm.config.engine import ENGINE_KINDS

    return _beginning(ENGINE_KINDS, incomplete)


def runs(incomplete: str, *, living: bool = False) -> list[str]:
    from kvbm_cli.runs.run_directory import Runs

    try:
        found = Runs.of_user().all()
    except (RuntimeError, OSError):  # there is no home, or it cannot be read
        return []
    return _beginning([run.facts.name for run in found if run.is_living or not living], incomplete)


def living_runs(incomplete: str) -> list[str]:
    return runs(incomplete, living=True)


def keys(incomplete: str) -> list[str]:
    """Keys of a profile that `--set` can change, section by section; behind the `=` what the key may be."""
    offered = [f"{key.path}={value}" for key in _keys() if not key.is_section for value in ("", *_values(key))]
    return _beginning(sorted({one for one in offered if ("=" in incomplete) != one.endswith("=")}), incomplete)


def sections_and_keys(incomplete: str) -> list[str]:
    return _beginning(sorted({key.path for key in _keys()}), incomplete)


def _keys() -> Iterator[Key]:
    from kvbm.config.engine import ENGINE_KINDS
    from kvbm.config.schema import keys as keys_of

    for kind in ENGINE_KINDS:
        yield from keys_of(engine=kind)


def _values(key: Key) -> list[str]:
    """All that a key may be, where these are a few words."""
    if key.kind == "true or false":
        return ["true", "false"]
    return re.findall("`([^`]+)`", key.kind) if _WORDS.fullmatch(key.kind) else []


_WORDS = re.compile("`[^`]+`(?: or `[^`]+`)*")


def _names_in(directory: Path, incomplete: str) -> list[str]:
    return _beginning(sorted(path.stem for path in directory.glob("*.yaml")), incomplete)


def _beginning(names: list[str] | tuple[str, ...], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
