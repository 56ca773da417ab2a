"""Shell completion: the names of profiles, runs, keys and so on. completion_shells.py connects them to the shells.

At each Tab the shell script runs `kvbm` with _KVBM_COMPLETE set, so everything here is fast. It fails silently, because
an error message would appear in the middle of the command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.errors import UsageError
from kvbm_cli.terminal.completion_shells import FILES, script
from kvbm_cli.terminal.console import print_data

if TYPE_CHECKING:
    from kvbm.config.keys import Key

SHELLS = ("bash", "zsh", "fish")


def print_script(shell: str, variable: str) -> None:
    """Print the completion script. UsageError for a shell that is not in SHELLS."""
    if shell not in SHELLS:
        known = ", ".join(f"`{one}`" for one in SHELLS)
        raise UsageError(f"completion is not available for `{shell}`", hint=f"supported shells: {known}")
    print_data(script(shell, variable))


def shells(incomplete: str) -> list[str]:
    return _matching(SHELLS, incomplete)


def files(incomplete: str) -> list[tuple[str, str]]:
    """Lets the shell complete file names."""
    return [(incomplete, FILES)]


def profiles(incomplete: str) -> list[str] | list[tuple[str, str]]:
    """Names of shipped profiles; files if no name matches."""
    from kvbm_cli.package_data import profiles_directory

    return _names_in(profiles_directory(), incomplete) or files(incomplete)


def compared(incomplete: str) -> list[str] | list[tuple[str, str]]:
    """Return what `kvbm bench --compare` takes."""
    from kvbm_cli.bench.comparison import BASELINE
    from kvbm_cli.package_data import profiles_directory

    names = [*_matching([BASELINE], incomplete), *_names_in(profiles_directory(), incomplete)]
    return names or files(incomplete)


def models(incomplete: str) -> list[str] | list[tuple[str, str]]:
    """Models of the catalogue; files if no name matches."""
    from kvbm.sizing.catalogue import catalogue

    return _matching(list(catalogue()), incomplete) or files(incomplete)


def workloads(incomplete: str) -> list[str] | list[tuple[str, str]]:
    from kvbm_cli.package_data import workloads_directory

    return _names_in(workloads_directory(), incomplete) or files(incomplete)


def engines(incomplete: str) -> list[str]:
    from kvbm.config.engine import ENGINE_KINDS

    return _matching(ENGINE_KINDS, incomplete)


def runs(incomplete: str, *, living: bool = False) -> list[str]:
    from kvbm_cli.runs.run_directory import Runs

    found = Runs.of_user_if_known()
    return _matching([run.facts.name for run in found if run.is_living or not living], incomplete)


def living_runs(incomplete: str) -> list[str]:
    return runs(incomplete, living=True)


def keys(incomplete: str) -> list[str]:
    """Profile keys for `--set`; after the `=` the possible values of the key."""
    offered = [f"{key.path}={value}" for key in _keys() if not key.is_section for value in ("", *_values(key))]
    return _matching(sorted({one for one in offered if ("=" in incomplete) != one.endswith("=")}), incomplete)


def sections_and_keys(incomplete: str) -> list[str]:
    return _matching(sorted({key.path for key in _keys()}), incomplete)


def _keys() -> Iterator[Key]:
    from kvbm.config.engine import ENGINE_KINDS
    from kvbm.config.keys import keys as keys_of

    for kind in ENGINE_KINDS:
        yield from keys_of(engine=kind)


def _values(key: Key) -> list[str]:
    """Possible values of a key that accepts only a few words."""
    if key.kind == "true or false":
        return ["true", "false"]
    return re.findall("`([^`]+)`", key.kind) if _WORDS.fullmatch(key.kind) else []


_WORDS = re.compile("`[^`]+`(?: or `[^`]+`)*")


def _names_in(directory: Path, incomplete: str) -> list[str]:
    return _matching(sorted(path.stem for path in directory.glob("*.yaml")), incomplete)


def _matching(names: list[str] | tuple[str, ...], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
