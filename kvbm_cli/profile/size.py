"""`kvbm size`, and the table of tiers that `kvbm serve` prints: blocks, tokens, bytes and the key that sets them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kvbm.config.document import plain_scalar
from kvbm.config.sizes import format_size
from kvbm.config.values import count_of, count_value
from kvbm.errors import ProfileError, UsageError
from kvbm.sizing import SizeUnknown, Sizing, TierSize, check_model, size
from kvbm.sizing.catalogue import catalogue
from kvbm_cli.engine.engines import runs_on_cpu
from kvbm_cli.engine.model_facts import model_facts
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.terminal.console import noted, print_data, print_json, table
from kvbm_cli.terminal.show_error import show_warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

BASE_PROFILE = "vllm"
_NAMES = {"G1": "G1 device", "G2": "G2 host", "G3": "G3 disk"}


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """What `kvbm size` computes. `options` are profile keys from options, as `{key: (option, text)}`.

    `length` is the tokens of a sequence. `tokens`, or `users` with `turns` of `turn_tokens` each, request the reverse
    calculation: the capacity that holds that many tokens.
    """

    profile: str | None
    model: str | None
    overrides: Sequence[str]
    options: Mapping[str, tuple[str, str]]
    length: int | None = None
    tokens: int | None = None
    users: int | None = None
    turns: int | None = None
    turn_tokens: int | None = None

    def resolve(self) -> ResolvedProfile:
        """A model without a profile has the settings of the shipped profile `vllm`."""
        if self.profile is None and self.model is None:
            raise UsageError("`kvbm size` requires a model or a profile", hint="try `kvbm size Qwen/Qwen3-8B`")
        given = [f"engine.model={self.model}"] if self.model is not None else []
        return resolve(self.profile or BASE_PROFILE, [*given, *self.overrides], dict(self.options))

    @property
    def wanted(self) -> tuple[int, int] | None:
        """The number of sequences to hold, and the tokens of each; None without such options."""
        per_user = (self.users, self.turns, self.turn_tokens)
        if self.tokens is not None and any(part is not None for part in per_user):
            raise UsageError("use either `--tokens`, or `--users`, `--turns` and `--turn-tokens`")
        if self.tokens is not None:
            return 1, self.tokens
        if all(part is None for part in per_user):
            return None
        if self.users is None or self.turns is None or self.turn_tokens is None:
            raise UsageError("`--users`, `--turns` and `--turn-tokens` must be used together")
        return self.users, self.turns * self.turn_tokens


def show_size(request: SizeRequest, *, as_json: bool, is_strict: bool) -> int:
    """Prints the sizes. Returns 1 if `is_strict` and a tier holds less than the one above it."""
    wanted, resolved = request.wanted, request.resolve()
    sizing = size_of(resolved, length=request.length)
    needed = None if wanted is None else _needed(resolved, *wanted)
    warnings = order_warnings(sizing)
    if as_json:
        print_json({**as_data(sizing), "needed": needed, "warnings": list(warnings)})
    else:
        print_data("\n".join(_report(resolved, sizing, needed)))
        for warning in warnings:
            show_warning(warning)
    return 1 if is_strict and warnings else 0


def count_option(name: str, text: str) -> int:
    """Returns the whole number of an option; `2M` is 2 million. UsageError names the option."""
    option = f"--{name.replace('_', '-')}"
    try:
        counted = count_value(plain_scalar(text))
    except ValueError:
        counted = None
    value = count_of(counted) if isinstance(counted, int | str) else None
    if value is None or value < 1:
        raise UsageError(
            f"`{option}` must be a whole number of at least 1, not `{text}`", hint=f"for example `{option} 200`"
        )
    return value


def show_catalogue(*, as_json: bool) -> None:
    names = sorted(catalogue(), key=str.lower)
    if as_json:
        print_json(names)
    else:
        print_data("\n".join(names))


def _report(resolved: ResolvedProfile, sizing: Sizing, needed: Mapping[str, object] | None) -> list[str]:
    lines = [f"a token is {format_size(sizing.token_bytes)}, {block_line(sizing)}"]
    lines += [f"note: {note}" for note in sizing.notes]
    lines += ["", tier_table(resolved, sizing)]
    if sizing.sequence_blocks:
        lines += ["", *_sequence_lines(sizing)]
    if needed is not None:
        lines += ["", *_needed_lines(needed)]
    return [*lines, "", *_variable_lines(sizing)]


def _sequence_lines(sizing: Sizing) -> list[str]:
    size = format_size(sizing.host_bytes(sizing.sequence_blocks))
    tiers = {"G1": sizing.device, "G2": sizing.host, "G3": sizing.disk}
    counts = [f"{name} {tier.sequence_count:,}" for name, tier in tiers.items() if tier is not None]
    blocks = f"{sizing.sequence_blocks:,} block{'s' * (sizing.sequence_blocks != 1)}"
    return [
        f"a sequence of {sizing.sequence_tokens:,} tokens is {blocks}, {size}",
        f"sequences that fit: {', '.join(counts)}",
    ]


def _needed(resolved: ResolvedProfile, sequences: int, tokens: int) -> dict[str, object]:
    """Returns the capacity that holds this many sequences of this length."""
    sizing = size_of(resolved, length=tokens)
    blocks = sequences * sizing.sequence_blocks
    size = sizing.host_bytes(blocks)
    return {"sequences": sequences, "tokens": sequences * tokens, "blocks": blocks, "bytes": size}


def _needed_lines(needed: Mapping[str, object]) -> list[str]:
    blocks, size = int(str(needed["blocks"])), int(str(needed["bytes"]))
    gigabytes = -(-size // 10**9)
    sequences = int(str(needed["sequences"]))
    return [
        f"{int(str(needed['tokens'])):,} tokens in {sequences} sequence{'s' * (sequences != 1)} "
        f"need {blocks:,} blocks, {format_size(size)}:",
        f"  tiers.host.capacity: {gigabytes}GB  or DYN_KVBM_CPU_CACHE_GB={gigabytes}",
        f"  tiers.disk.capacity: {gigabytes}GB  or DYN_KVBM_DISK_CACHE_GB={gigabytes}, if there is a disk tier",
    ]


def _variable_lines(sizing: Sizing) -> list[str]:
    lines = [
        "the same numbers of blocks as variables:",
        f"  DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS={sizing.host.block_count}",
    ]
    if sizing.disk is not None:
        lines.append(f"  DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS={sizing.disk.block_count}")
    return lines


def order_warnings(sizing: Sizing) -> tuple[str, ...]:
    """Returns a warning for each tier that holds fewer tokens than the one above it, and so adds little."""
    tiers = [("G1", sizing.device), ("G2", sizing.host), ("G3", sizing.disk)]
    present = [(name, tier) for name, tier in tiers if tier is not None]
    return tuple(
        f"{below} holds {lower.token_count:,} tokens, fewer than the {upper.token_count:,} of {above}, and adds little"
        for (above, upper), (below, lower) in pairwise(present)
        if lower.token_count < upper.token_count
    )


def size_of(resolved: ResolvedProfile, *, length: int | None = None) -> Sizing:
    """Computes the sizes of the tiers. `length` is the tokens of a sequence, by default the maximum length.

    ProfileError, at the place of the key, for a model without a size or a tier that holds no block. SizeUnknown if only
    the engine knows the sizes.
    """
    profile, key = resolved.profile, "engine.model"
    try:
        facts = model_facts(profile.engine.model, kind=profile.engine.kind)
        check_model(profile, facts)  # errors here are about the model; errors of `size` are not
        key = size_key(resolved)
        on_cpu = profile.engine.kind == "vllm" and runs_on_cpu(profile)
        return size(profile, facts, environment=os.environ, on_cpu=on_cpu, sequence_tokens=length)
    except ProfileError as error:
        if error.hint is not None and "tiers.disk" in error.hint:
            key = "tiers.disk.blocks" if profile.tiers.disk and profile.tiers.disk.blocks else "tiers.disk.capacity"
        raise resolved.mistake(key, error.message, hint=error.hint) from None


def size_if_known(resolved: ResolvedProfile) -> Sizing | None:
    """Returns the sizes, None if only the engine knows them."""
    try:
        return size_of(resolved)
    except SizeUnknown:
        return None


def size_key(resolved: ResolvedProfile) -> str:
    """The key that sets the size of G2, or of G3 without a host tier."""
    tiers = resolved.profile.tiers
    section, name = (tiers.host, "tiers.host") if tiers.host is not None else (tiers.disk, "tiers.disk")
    return f"{name}.blocks" if section is not None and section.blocks else f"{name}.capacity"


def block_line(sizing: Sizing) -> str:
    ranks = f" on each of {sizing.rank_count} ranks" if sizing.rank_count > 1 else ""
    return f"a block is {sizing.block_tokens} tokens, {format_size(sizing.block_bytes)}{ranks}"


def tier_table(resolved: ResolvedProfile, sizing: Sizing, *, has_cache: bool = True) -> str:
    tiers: dict[str, TierSize | None] = {"G1": sizing.device}
    if has_cache:
        tiers |= {"G2": sizing.host, **({"G3": sizing.disk} if sizing.disk else {})}
    rows = [("tier", "blocks", "tokens", "size"), *(_row(name, tier) for name, tier in tiers.items())]
    set_by = [("set by", ""), *(_set_by(resolved, tier) for tier in tiers.values())]
    lines = zip(table(rows, right=(1, 2, 3)).splitlines(), set_by, strict=True)
    return "\n".join(noted(noted(line, key), origin, separator=" ").rstrip() for line, (key, origin) in lines)


def _row(name: str, tier: TierSize | None) -> tuple[str, str, str, str]:
    if tier is None:
        return _NAMES[name], "-", "-", "-"
    return _NAMES[name], f"{tier.block_count:,}", f"{tier.token_count:,}", format_size(tier.total_bytes)


def _set_by(resolved: ResolvedProfile, tier: TierSize | None) -> tuple[str, str]:
    """Returns the key that set the size of a tier, and its origin."""
    if tier is None:
        return "determined by the engine at start-up", ""
    if tier.set_by == "tiers.host.blocks" and resolved.profile.tiers.host is None:
        return "buffer for the disk tier", ""
    variable = f"engine.environment.{tier.set_by}"
    key = variable if variable in resolved.origins else tier.set_by
    return key, f"({resolved.origins.get(key, 'environment').rpartition('/')[2]})"


def as_data(sizing: Sizing, *, has_cache: bool = True) -> Mapping[str, object]:
    """The sizes as JSON data. G1 is null if the engine determines it at start-up, the others without a cache."""
    host, disk = (sizing.host, sizing.disk) if has_cache else (None, None)
    return {
        "token_bytes": sizing.token_bytes,
        "block": {"tokens": sizing.block_tokens, "bytes": sizing.block_bytes, "ranks": sizing.rank_count},
        "sequence": {"tokens": sizing.sequence_tokens, "blocks": sizing.sequence_blocks},
        "notes": list(sizing.notes),
        "tiers": {"G1": _tier_data(sizing.device), "G2": _tier_data(host), "G3": _tier_data(disk)},
    }


def _tier_data(tier: TierSize | None) -> Mapping[str, object] | None:
    if tier is None:
        return None
    return {
        "blocks": tier.block_count,
        "tokens": tier.token_count,
        "sequences": tier.sequence_count,
        "bytes": tier.total_bytes,
    }
