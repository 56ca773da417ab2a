"""`kvbm cache ls RUN` and `kvbm cache clear RUN`: the blocks of a running engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbm.errors import UsageError
from kvbm.hashing import tenant
from kvbm.text.outside import shown
from kvbm.types import Tier
from kvbm_cli.cache.control_client import Reply, ask
from kvbm_cli.runs.run_client import living
from kvbm_cli.runs.run_directory import EngineRun, Runs
from kvbm_cli.terminal.console import is_confirmed, print_data, print_json, print_note, table
from kvbm_cli.terminal.quantities import counted, shown_size

HEAD = ("engine", "tier", "tenant", "blocks", "bytes", "< 1 min", "< 10 min", "< 1 h", "< 1 d", "older")
SHOWN_DIGITS = 12  # of a tenant's digest
TIERS = {"G2": Tier.HOST, "G3": Tier.DISK}
DIGEST_DIGITS = 32


def list_blocks(reference: str, *, as_json: bool) -> int:
    """Return 1 if an engine refused."""
    run = live_run(reference)
    replies = ask(run, {"verb": "ls"})
    if as_json:
        print_json([{"engine": one.engine, "refused": one.refused, **one.answer} for one in replies])
    else:
        rows = [row for one in replies for row in _rows(one)]
        if rows:
            print_data(table([HEAD, *rows], right=range(3, len(HEAD))))
        for one in replies:
            print_data("\n".join(["", *_summary(one)]) if one.answer else "")
    return note_refusals(replies)


def clear_blocks(reference: str, *, tier: str | None, salt: str | None, digest: str | None, is_sure: bool) -> int:
    """Return 1 if the user did not confirm, if an engine refused, or if the disk has not confirmed."""
    run, owner = live_run(reference), owner_of(salt, digest)
    if tier is not None and tier not in TIERS:
        hint = "`kvbm cache purge --url URL` deletes objects, which engines share" if tier == "G4" else None
        raise UsageError(f"`--tier {tier}` cannot be cleared: it must be G2 or G3", hint=hint)
    whose = "" if owner is None else " of one tenant"
    where = "G2 and G3" if tier is None else tier
    if not is_sure and not is_confirmed(f"remove the blocks{whose} in {where} of `{run.name}`?"):
        return 1
    message = {"verb": "clear", **({"tier": tier} if tier else {}), **({"tenant": owner} if owner else {})}
    replies, status = ask(run, message), 0
    for one in replies:
        for name, count in one.answer.get("forgotten", {}).items():
            print_data(f"removed {counted(count, 'block')} from {name}")
        if late := one.answer.get("not_durable"):
            print_note(f"G3 is off until its blocks are deleted from disk: {late}")
            status = 1
    return max(status, note_refusals(replies))


def live_run(reference: str) -> EngineRun:
    return living(Runs.of_user().one(reference))


def owner_of(salt: str | None, digest: str | None) -> str | None:
    """Return the digest of a tenant in hex."""
    if salt is not None and digest is not None:
        raise UsageError("`--salt` and `--tenant-digest` cannot be used together", hint="remove one of them")
    if digest is None:
        return None if salt is None else tenant(salt).hex()
    if len(digest) != DIGEST_DIGITS or not set(digest) <= set("0123456789abcdef"):
        hint = "`kvbm cache ls RUN --json` shows the digests of tenants"
        raise UsageError(f"`--tenant-digest` must have {DIGEST_DIGITS} hexadecimal digits", hint=hint)
    return digest


def _rows(reply: Reply) -> list[tuple[str, ...]]:
    rows = []
    for tier in reply.answer.get("tiers", ()):
        for one in tier.get("tenants", ()):
            ages = one["blocks_by_age"]
            size = shown_size(sum(ages) * reply.answer["block_bytes"])
            owner = one["tenant"][:SHOWN_DIGITS] or "-"
            rows.append((str(reply.engine), tier["tier"], owner, f"{sum(ages):,}", size, *(f"{n:,}" for n in ages)))
    return rows


def _summary(reply: Reply) -> list[str]:
    """Return a line for the model and for each tier of an engine."""
    answer = reply.answer
    of_engine = f"engine {reply.engine}"
    return [
        f"{of_engine}: model {answer['model'] or 'unknown'}, blocks of {answer['block_tokens']} tokens",
        *(f"{of_engine}: {_line_of(tier)}" for tier in answer["tiers"]),
        *_pins(of_engine, answer.get("pins", ())),
    ]


def _pins(of_engine: str, pins: Sequence[dict[str, Any]]) -> list[str]:
    if not pins:
        return []
    verb = "holds" if len(pins) == 1 else "hold"
    return [f"{of_engine}: {counted(len(pins), 'pin')} {verb} {counted(sum(one['blocks'] for one in pins), 'block')}"]


def _line_of(tier: dict[str, Any]) -> str:
    if "states" not in tier:
        state = "on" if tier["is_on"] else "off"
        return f"{tier['tier']} is {state}; its objects belong to all engines: `kvbm cache ls --url URL` lists them"
    states = tier["states"]
    text = f"{tier['tier']} has {states['evictable'] + states['pinned']:,} of {tier['capacity_blocks']:,} blocks"
    text += f", {states['pinned']:,} of them pinned" if states["pinned"] else ""
    text += "" if tier.get("is_on", True) else "; it is off"
    left_out = tier["left_out"]
    return text + (f"; {left_out['blocks']:,} of {left_out['tenants']:,} more tenants" if left_out["tenants"] else "")


def note_refusals(replies: Sequence[Reply]) -> int:
    for one in replies:
        if one.refused:
            print_note(f"engine {one.engine} refused: {shown(one.refused)}")
    return 1 if any(one.refused for one in replies) else 0
