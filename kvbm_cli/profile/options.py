"""Options with a profile, which many commands have, and their completion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from kvbm_cli.terminal.options import argument, flag, matching, option

if TYPE_CHECKING:
    from kvbm.config.key_list import Key


# For texts of help, which import no pydantic.
SIZED_ENGINES = "`vllm`, `tensorrt-llm` or `sglang`"
ENGINES = "`vllm`, `tensorrt-llm`, `sglang` or `embedded`"
DEFAULT = "[default: `vllm`]"


def profiles(incomplete: str) -> list[str]:
    """Names of shipped profiles."""
    from kvbm.config.layers import shipped, shipped_halves
    from kvbm_cli.package_data import profiles_directory

    directories = [profiles_directory()]
    return matching([*shipped(directories), *shipped_halves(directories)], incomplete)


def engines(incomplete: str) -> list[str]:
    from kvbm.config.engine import ENGINE_KINDS

    return matching(ENGINE_KINDS, incomplete)


def keys(incomplete: str) -> list[str]:
    """Profile keys for `--set`; after the `=` the possible values of the key."""
    offered = [f"{key.path}={value}" for key in _keys() if not key.is_section for value in ("", *_values(key))]
    return matching(sorted({one for one in offered if ("=" in incomplete) != one.endswith("=")}), incomplete)


def sections_and_keys(incomplete: str) -> list[str]:
    return matching(sorted({key.path for key in _keys()}), incomplete)


def _keys() -> Iterator[Key]:
    from kvbm.config.engine import ENGINE_KINDS
    from kvbm.config.key_list import keys as keys_of

    for kind in ENGINE_KINDS:
        yield from keys_of(engine=kind)


def _values(key: Key) -> list[str]:
    """Possible values of a key that accepts only a few words."""
    if key.kind == "true or false":
        return ["true", "false"]
    return re.findall("`([^`]+)`", key.kind) if _WORDS.fullmatch(key.kind) else []


_WORDS = re.compile("`[^`]+`(?: or `[^`]+`)*")
PROFILE_HELP = "Name of a shipped profile, or path to a profile file."
PROFILES_HELP = f"{PROFILE_HELP} May be repeated; the last one wins, key by key."


def profile_option(help_: str = PROFILES_HELP) -> Any:
    return option("--profile -p", "NAME|PATH", help_, profiles)


ProfilesOption = Annotated[list[str], profile_option()]
OptionalProfilesOption = Annotated[list[str] | None, profile_option()]
ProfileArgument = Annotated[str, argument("NAME|PATH", PROFILE_HELP, profiles)]
FirstProfileArgument = Annotated[str | None, argument("NAME|PATH", PROFILE_HELP, profiles)]
MORE_PROFILES_HELP = "The profile, or one that overrides it; may be repeated, the last one wins, key by key."
MoreProfilesOption = Annotated[list[str] | None, profile_option(MORE_PROFILES_HELP)]
SET_HELP = "Override a profile key; may be repeated, the last one wins. `kvbm profile schema KEY` describes it."
SetOption = Annotated[list[str] | None, option("--set", "KEY=VALUE", SET_HELP, keys)]
STRICT_HELP = "Exit with 1 if a tier holds less than the one above it."
StrictOption = Annotated[bool, flag("--strict", STRICT_HELP)]
