"""`kvbm cache ls` and `kvbm cache purge` with `--url`: what is in the store of a shared tier, and how to remove it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbm.text.outside import shown
from kvbm_cli.cache.store_selection import PROGRESS_AFTER_S, Selected, StoreRequest, block_tokens, opened, select
from kvbm_cli.terminal.console import is_confirmed, print_data, print_json, print_note, table
from kvbm_cli.terminal.progress import ProgressDisplay
from kvbm_cli.terminal.quantities import counted, shown_size, time_since

if TYPE_CHECKING:
    from kvbm_cli.store.inventory import Inventory

SHOWN_HEX = 16
NOT_CONFIRMED = INCOMPLETE = 1
SHOWN_LEFT_OUT = 10
HEAD = ("namespace", "model", "engine", "tokens", "objects", "bytes", "oldest", "newest")
RIGHT = (3, 4, 5, 6, 7)


def list_objects(request: StoreRequest, *, as_json: bool) -> int:
    """Return INCOMPLETE if a part of the store cannot be listed."""
    inventory = opened(request)
    found = select(inventory, request)
    if as_json:
        print_json([one.as_data() for one in found])
    elif not found:
        print_data(f"no objects in {request.url}")
    else:
        print_data(f"{_rows(found)}\n\n{_sum(found)} in {request.url}")
        _note_others(found)
    return note_left_out(inventory)


def purge(request: StoreRequest, *, is_sure: bool, is_dry_run: bool) -> int:
    """Delete the selection. Returns 1 if the user did not confirm, or if something cannot be listed or deleted."""
    inventory = opened(request, changes=not is_dry_run)
    found = select(inventory, request)
    if not found:
        print_data(f"no objects in {request.url}")
        return note_left_out(inventory)
    _note_others(found)
    if is_dry_run:
        print_data(f"{_rows(found)}\n\nwould delete {_sum(found)} in {request.url}")
        return note_left_out(inventory)
    if not is_sure and not is_confirmed(f"delete {_sum(found)} in {request.url}?"):
        return NOT_CONFIRMED
    with ProgressDisplay("deleting", delay_s=PROGRESS_AFTER_S) as progress:
        deleted = [_delete(inventory, one, progress) for one in found]
    print_data(f"deleted {_sum(deleted)}")
    return note_left_out(inventory)


def note_left_out(inventory: Inventory) -> int:
    """Names what was not touched. Returns INCOMPLETE if objects may be there, or should have been deleted."""
    named = sorted(inventory.left_out, key=lambda one: not one.is_failure)[:SHOWN_LEFT_OUT]
    for one in named:
        print_note(f"skipped {shown(one.key)}: {one.why}")
    if (more := inventory.left_out_count - len(named)) > 0:
        print_note(f"skipped {more:,} more")
    return INCOMPLETE if inventory.failure_count else 0


def _delete(inventory: Inventory, selected: Selected, progress: ProgressDisplay) -> Selected:
    """Delete objects, and their namespace if none is left. Returns what was deleted."""
    total = len(selected.extents)
    remaining = set(inventory.delete(selected.extents, lambda done: progress.report(f"{done} of {total} objects")))
    if selected.is_whole and not remaining:
        inventory.delete_facts(selected.stored.namespace)
    return replace(selected, extents=[extent for extent in selected.extents if extent not in remaining])


def _rows(found: Sequence[Selected]) -> str:
    return table([HEAD, *map(_row, found)], right=RIGHT)


def _row(one: Selected) -> tuple[str, ...]:
    written = [extent.written_s for extent in one.extents]
    tokens = block_tokens(one)
    return (
        one.name[:SHOWN_HEX],
        one.fact("model") or "-",
        one.fact("engine") or "-",
        "-" if tokens is None else str(tokens),
        f"{len(one.extents):,}",
        shown_size(one.byte_count),
        time_since(min(written, default=None)),
        time_since(max(written, default=None)),
    )


def _sum(found: Sequence[Selected]) -> str:
    objects, size = sum(len(one.extents) for one in found), sum(one.byte_count for one in found)
    return f"{counted(objects, 'object')} of {counted(len(found), 'namespace')}, {shown_size(size)}"


def _note_others(found: Sequence[Selected]) -> None:
    others = sum(one.stored.other_count for one in found)
    if others:
        print_note(f"{counted(others, 'object')} in these namespaces not written by kvbm, never read and never deleted")
