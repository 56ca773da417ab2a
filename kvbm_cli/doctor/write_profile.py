"""`kvbm doctor --write`: writes a profile that extends the given ones with the recommended settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvbm.config.files import real_path
from kvbm.config.layers import shipped_name
from kvbm.config.load import ResolvedProfile
from kvbm.errors import UsageError
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.text import extends_value, scalar
from kvbm_cli.system.filesystem import write_new

SECTION = "tiers.disk."


def require_disk_tier(resolved: ResolvedProfile | None) -> None:
    """UsageError for a profile without a disk tier."""
    if resolved is None or resolved.profile.tiers.disk is None:
        raise UsageError("the profile has no `tiers.disk`, so there is nothing to write", hint="remove `--write`")


def write_profile(resolved: ResolvedProfile, recommended: Mapping[str, str | bool], target: Path) -> None:
    """Write `target`, which must not exist, with the keys of the disk tier that are recommended, or that come from the
    command line or a variable. EnvironmentProblem if it cannot be written."""
    require_disk_tier(resolved)
    given = [key for key, source in resolved.sources.items() if key.startswith(SECTION) and source.line is None]
    keys = {**{key: resolved.values[key] for key in given}, **recommended}
    parents = [shipped_name(path, [profiles_directory()]) or str(real_path(path)) for path in resolved.paths]
    lines = [f"    {key.removeprefix(SECTION)}: {scalar(value)}" for key, value in keys.items()]
    write_new(target, "\n".join([f"extends: {extends_value(parents)}", "", "tiers:", "  disk:", *lines, ""]))
