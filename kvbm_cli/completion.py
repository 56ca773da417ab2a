"""Completion in a shell: the scripts for bash, zsh and fish, and the names that are completed beside the commands'.

A script asks the command itself, with _KVBM_COMPLETE in its environment, each time that Tab is pressed; so everything
here is quick and says nothing when it fails: there is no place for an error in the middle of a line.
"""

from __future__ import annotations

from kvbm.errors import UsageError
from kvbm_cli.app import COMPLETION_VARIABLE
from kvbm_cli.console import print_data

PROGRAM = "kvbm"
SHELLS = ("bash", "zsh", "fish")


def print_script(shell: str) -> None:
    """UsageError for a shell that is none of SHELLS."""
    import difflib

    from typer._completion_shared import get_completion_script

    if shell not in SHELLS:
        nearest = difflib.get_close_matches(shell, SHELLS, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are {', '.join(f'`{one}`' for one in SHELLS)}"
        raise UsageError(f"there is no completion for `{shell}`", hint=hint)
    print_data(get_completion_script(prog_name=PROGRAM, complete_var=COMPLETION_VARIABLE, shell=shell))


def prepare() -> None:
    """Makes known to the parser what answers a shell."""
    from typer._completion_classes import completion_init

    completion_init()


def shells(incomplete: str) -> list[str]:
    return _beginning(SHELLS, incomplete)


def profiles(incomplete: str) -> list[str]:
    """Names of the shipped ones. Where none begins so, the shell goes on with the names of files."""
    from kvbm_cli.shipped import profiles_directory

    return _beginning(sorted(path.stem for path in profiles_directory().glob("*.yaml")), incomplete)


def workloads(incomplete: str) -> list[str]:
    from kvbm_cli.shipped import workloads_directory

    return _beginning(sorted(path.stem for path in workloads_directory().glob("*.yaml")), incomplete)


def runs(incomplete: str, *, living: bool = False) -> list[str]:
    from kvbm_cli.runs import Runs

    try:
        found = Runs.of_user().all()
    except (RuntimeError, OSError):  # there is no home, or it cannot be read
        return []
    return _beginning([run.facts.name for run in found if run.is_living or not living], incomplete)


def living_runs(incomplete: str) -> list[str]:
    return runs(incomplete, living=True)


def keys(incomplete: str) -> list[str]:
    """Keys of a profile that `--set` can change, section by section."""
    from kvbm.config.engine import ENGINE_KINDS
    from kvbm.config.schema import keys as keys_of

    paths = {key.path for kind in ENGINE_KINDS for key in keys_of(engine=kind) if not key.is_section}
    return _beginning(sorted(f"{path}=" for path in paths), incomplete)


def _beginning(names: list[str] | tuple[str, ...], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
