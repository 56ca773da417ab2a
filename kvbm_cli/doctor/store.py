"""Checks of the store of the shared tier (G4): its library and secret, what it allows, and from where on it pays."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.sizes import format_size
from kvbm.errors import EnvironmentProblem
from kvbm.tiers.shared.keys import extent_blocks
from kvbm.tiers.shared.settings import directory_of
from kvbm_cli.doctor.check import NO_ANSWER, DoctorContext
from kvbm_cli.doctor.machine import ProbeFailed
from kvbm_cli.doctor.probes.store import IN_FLIGHT, OBJECT_BYTES, PREFIX, SMALL_GETS, StoreReport
from kvbm_cli.profile.machine_check import Check, failure, ok, skipped, warning
from kvbm_cli.system.answering import answers
from kvbm_cli.terminal.quantities import shown_rate

if TYPE_CHECKING:
    from kvbm.config.schema import SharedTierSection
    from kvbm.sizing import Sizing

SECONDS, QUICK_SECONDS = 2.0, 0.4
TIMEOUT_S, QUICK_TIMEOUT_S = 90.0, 9.0
IMPORT_TIMEOUT_S, QUICK_IMPORT_TIMEOUT_S = 60.0, 8.0
MAX_CLOCK_S = 60.0
EXTRA = "`pip install 'kvbm-cli[shared]'`"
MOONCAKE_EXTRA = "`pip install 'kvbm-cli[mooncake]'` and `apt install libibverbs1`"
CREDENTIALS = "see the variables of the store, such as `AWS_ACCESS_KEY_ID`, `AWS_REGION` and `AWS_ENDPOINT_URL`"
REMEDIES = {
    "connect": "check the URL of the store",
    "list": f"check that the bucket exists and may be listed (`s3:ListBucket`); {CREDENTIALS}",
    "put": "allow `s3:PutObject`, or set `tiers.shared.write: false` if this engine only reads",
    "get": "allow `s3:GetObject`",
    "delete": "allow `s3:DeleteObject`: `kvbm cache`, `kvbm bench` and the doctor use it, engines do not",
}
DIRECTORY_REMEDIES = {
    "connect": "`mkdir -p` the directory, or mount its file system",
    "list": "check the permissions of the directory with `ls -ld`",
    "put": "make the directory writable, or set `tiers.shared.write: false` if this engine only reads",
    "get": "check the permissions of the files with `ls -l`",
    "delete": "make the directory writable",
}
OTHER_STORE = "mount it again, or use another store (`--url` or `tiers.shared.url`)"


def checks(context: DoctorContext) -> Iterator[Check]:
    assert context.url is not None
    is_pool = context.url.startswith("mooncake:")
    if context.resolved is not None:
        yield from _library(context, context.url)
    if context.shared is not None:
        yield from _secret(context.shared)
    place, writes = directory_of(context.url), context.shared is None or context.shared.write
    if place is not None and not answers(place, changes=writes):
        yield failure("store", NO_ANSWER, OTHER_STORE)
        return
    seconds, timeout_s = (QUICK_SECONDS, QUICK_TIMEOUT_S) if context.is_quick else (SECONDS, TIMEOUT_S)
    try:
        given = {"url": context.url, "seconds": seconds, "writes": writes}
        answer = context.machine.run_probe(
            sys.executable, "store", [json.dumps(given)], timeout_s=timeout_s, on_phase=context.on_phase
        )
    except ProbeFailed as error:
        remedy = "check that `mooncake_master` runs" if is_pool else CREDENTIALS
        yield failure("store", f"does not answer: {error}", f"check the address of the store; {remedy}")
        return
    report = StoreReport(**answer["report"])
    remedies = REMEDIES if directory_of(context.url) is None else DIRECTORY_REMEDIES
    yield from _pool(report, writes=writes) if is_pool else _permissions(report, remedies, writes=writes)
    if report.clock_s is not None:
        yield _clock(report.clock_s)
    yield from _speed(context, report, writes=writes)


def _library(context: DoctorContext, url: str) -> Iterator[Check]:
    """Check the interpreter of the engine, which may differ from this one. A store in a directory needs no library."""
    assert context.resolved is not None
    python = context.resolved.profile.engine.python or sys.executable
    is_encrypted = context.shared is not None and context.shared.protection == "aes-gcm"
    is_pool = url.startswith("mooncake:")
    modules = [] if directory_of(url) is not None else ["mooncake.store" if is_pool else "obstore"]
    modules += ["cryptography"] if is_encrypted else []
    if not modules:
        return
    extra = MOONCAKE_EXTRA if is_pool else EXTRA
    timeout_s = QUICK_IMPORT_TIMEOUT_S if context.is_quick else IMPORT_TIMEOUT_S
    remedy = "check the value of `engine.python`"
    arguments = ["connector", *modules]
    answer = context.answer_of("library", python, "engine", arguments, timeout_s=timeout_s, remedy=remedy)
    if isinstance(answer, Check):
        yield answer
    elif answer["error"] is not None:
        yield failure("library", f"`{python}`: {answer['error']}", f"{extra} in that environment")
    else:
        yield ok("library", f"{' and '.join(modules)} can be imported")


def _secret(shared: SharedTierSection) -> Iterator[Check]:
    from kvbm.tiers.shared.protection import protection_of

    if shared.protection == "none":
        return
    path = None if shared.key_file is None else Path(shared.key_file).expanduser()
    try:
        protection_of(shared.protection, path)
    except EnvironmentProblem as error:
        yield failure("secret", error.message, error.hint or "set `tiers.shared.key_file`")
        return
    if path is not None and os.stat(path).st_mode & 0o077:
        finding = f"`{path}` can be read by other users of this machine"
        yield warning("secret", finding, f"`chmod 600 {shlex.quote(str(path))}`")
    else:
        yield ok("secret", f"can be read, for `tiers.shared.protection: {shared.protection}`")


def _permissions(report: StoreReport, remedies: Mapping[str, str], *, writes: bool) -> Iterator[Check]:
    if report.failed is None:
        steps = "list, put, get and delete work" if writes else "list and get work; this engine does not write"
        yield ok("permissions", steps)
    elif report.failed == "delete":
        yield warning("permissions", f"delete fails: {report.reason}", remedies["delete"])
    else:
        remedy = EXTRA if "requires the package" in str(report.reason) else remedies[report.failed]
        yield failure("permissions", f"{report.failed} fails: {report.reason}", remedy)
    if report.left_objects:
        finding = f"objects of the doctor below `{PREFIX}/` that could not be deleted: {report.left_objects}"
        yield warning("leftovers", finding, f"delete `{PREFIX}/` in the store", count=report.left_objects)


def _pool(report: StoreReport, *, writes: bool) -> Iterator[Check]:
    """Check of a pool of Mooncake Store, which has no permissions, no listing and no clock."""
    if report.failed is None:
        steps = "put, get and remove work" if writes else "the master answers; this engine does not write"
        yield ok("pool", steps)
    else:
        assert report.reason is not None
        if "library" in report.reason:
            remedy = MOONCAKE_EXTRA
        elif report.failed in ("connect", "list"):
            remedy = "start `mooncake_master`, or set another `tiers.shared.url`"
        else:
            remedy = "start an owner: `mooncake_client --global_segment_size=64GB`"
        yield failure("pool", f"{report.failed} fails: {report.reason}", remedy)


def _clock(clock_s: float) -> Check:
    """Check how far the clock of the store is ahead."""
    if abs(clock_s) <= MAX_CLOCK_S:
        return ok("clock", "agrees with this machine within a minute", clock_s=clock_s)
    finding = f"the store is {abs(clock_s):.0f} s {'ahead of' if clock_s > 0 else 'behind'} this machine"
    return warning("clock", finding, "synchronise the clock of this machine", clock_s=clock_s)


def _speed(context: DoctorContext, report: StoreReport, *, writes: bool) -> Iterator[Check]:
    if report.small_get_s is not None:
        finding = f"median of {SMALL_GETS} small reads: {report.small_get_s * 1000:.2g} ms"
        yield ok("latency", finding, small_get_s=report.small_get_s)
    if report.get_rate is None or report.put_rate is None or report.object_get_s is None:
        if report.failed is None and not writes:
            finding = "not measured with `tiers.shared.write: false`, because this writes objects"
            yield skipped("throughput", finding, "add `--set tiers.shared.write=true`, or use another profile")
        return
    finding = (
        f"reads {shown_rate(report.get_rate)}, writes {shown_rate(report.put_rate)} "
        f"({format_size(OBJECT_BYTES)} objects, {IN_FLIGHT} in flight)"
    )
    yield ok("throughput", finding, get_rate=round(report.get_rate), put_rate=round(report.put_rate))
    if context.sizing is None:
        remedy = "add `--profile PROFILE`" if context.resolved is None else None
        yield skipped("break-even", "tokens/s depend on the block size, which is unknown", remedy)
    else:
        yield _break_even(context.sizing, report.get_rate, _first_s(report), context.prefill_rate)


def _first_s(report: StoreReport) -> float:
    """Return the seconds until the first blocks of a read arrive: one request finds them, the next one reads them."""
    assert report.small_get_s is not None
    assert report.object_get_s is not None
    return report.small_get_s + report.object_get_s


def _break_even(sizing: Sizing, get_rate: float, first_s: float, prefill_rate: float | None) -> Check:
    """Compare loading with computing, as `kvbm.tiers.rates` does: a read takes at least `first_s`."""
    stored_tokens, stored_bytes = sizing.host.token_count, sizing.host.total_bytes
    load_rate = get_rate * stored_tokens / stored_bytes
    facts = {"tokens_per_s": round(load_rate), "first_s": first_s}
    shown = f"{load_rate:,.0f} tokens/s, the first after {first_s * 1000:.2g} ms"
    if prefill_rate is None:
        finding = f"the store delivers {shown}; an engine that prefills faster recomputes"
        return ok("break-even", finding, **facts)
    if load_rate <= prefill_rate:
        finding = f"the store delivers {shown}: never faster than a prefill of {prefill_rate:,.0f} tokens/s"
        return warning("break-even", finding, "use a faster store or network, or remove `tiers.shared`", **facts)
    blocks = extent_blocks(sizing.stored_bytes, sizing.block_tokens) if sizing.group_count == 1 else 1
    extent_tokens = sizing.block_tokens * blocks
    tokens = math.ceil(max(first_s * prefill_rate, 1) / extent_tokens) * extent_tokens
    finding = f"pays from a common prefix of {tokens:,} tokens on: the store delivers {shown}"
    return ok("break-even", finding, **facts, pays_from_tokens=tokens)
