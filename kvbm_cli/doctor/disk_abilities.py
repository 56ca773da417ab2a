"""What a directory can do for the disk tier (G3), as the probe found it: space, direct I/O, queues, speed.

Where a profile has a disk tier, what that tier would fail at is a failure; what a directory merely lacks is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbm.config.sizes import format_size
from kvbm.disk.files import PAGE_BYTES
from kvbm_cli.doctor.probe import Direct, Report, Settings
from kvbm_cli.doctor.result import Check, State, failure, ok, rate, skipped, warning
from kvbm_cli.doctor.speed import Speed
from kvbm_cli.doctor.subject import ANOTHER, Subject

EXAMPLE_TOKENS = 4000


def checks(subject: Subject, report: Report, needs: Settings, needed_bytes: int | None) -> Iterator[Check]:
    """`needs` are the settings that follow, and `needed_bytes` what the tier takes."""
    yield _fallocate(subject, report, needs, needed_bytes)
    assert report.by_open is not None
    assert report.by_fcntl is not None
    yield from _direct(subject, report.by_open, report.by_fcntl, needs)
    yield _alignment(report, report.by_open)
    yield _punch_hole(report)
    yield from queue_checks(subject, report)
    if report.transfers is not None and not report.transfers.works:
        finding = f"many blocks at once fail: {report.transfers.reason}"
        yield failure("speed", finding, f"a quota or limit of this user, the log of the kernel, or {ANOTHER}")
    elif report.speed is None:
        yield skipped("speed", f"not measured: {report.reason}")
    else:
        yield from _speed(report.speed)
        yield from _onboarding(subject, report.speed)


def _fallocate(subject: Subject, report: Report, needs: Settings, needed_bytes: int | None) -> Check:
    assert report.fallocate is not None
    if report.fallocate.works:
        return ok("fallocate", "works")
    if not needs.zerofill:
        return failure("fallocate", f"fails: {report.fallocate.reason}", ANOTHER)
    finding = f"{report.fallocate.reason}: space can only be taken by writing zeros"
    if needed_bytes is not None and report.speed is not None:
        finding += f", {needed_bytes / report.speed.sequential_write:.0f} s at the first start"
    if subject.disk is not None and subject.disk.zerofill:
        return ok("fallocate", finding)
    say = failure if subject.disk is not None else warning
    return say("fallocate", finding, "`tiers.disk.zerofill: true`")


def _punch_hole(report: Report) -> Check:
    assert report.punch_hole is not None
    if report.punch_hole.works:
        return ok("punch hole", "works")
    finding = f"{report.punch_hole.reason}: a cache that shrinks gives nothing back before it ends"
    return warning("punch hole", finding)


def _direct(subject: Subject, by_open: Direct, by_fcntl: Direct, needs: Settings) -> Iterator[Check]:
    disk = subject.disk
    wanted = None if disk is None or not disk.o_direct else disk.allocator
    remedy = f"`tiers.disk.allocator: {needs.allocator}`" if needs.o_direct else "`tiers.disk.o_direct: false`"
    for name, way, allocator in (("by open", by_open, "open-direct"), ("by fcntl", by_fcntl, "default")):
        name = f"O_DIRECT {name}"
        facts = {"alignment": way.alignment, "is_cached": way.is_cached}
        is_trap = way.works and not by_open.works
        if is_trap:
            finding = "accepted, but open refuses it: fcntl never asked the filesystem"
        elif not way.works:
            finding = f"fails: {way.reason}"
        elif way.is_cached:
            finding = "accepted, and the page cache is used all the same"
        else:
            finding = f"written and read back at an alignment of {way.alignment}"
        if way.works and not is_trap:
            state = State.OK
        else:
            state = State.FAILURE if wanted == allocator else State.WARNING
        yield Check(name, state, finding, None if state is State.OK else remedy, facts)
    if disk is not None and not disk.o_direct and needs.o_direct and not by_open.is_cached:
        finding = "off, though it works: the page cache will hold every block a second time"
        yield warning("O_DIRECT", finding, "`tiers.disk.o_direct: true`")


def _alignment(report: Report, way: Direct) -> Check:
    claimed = report.claimed
    if way.alignment is None:
        return skipped("alignment", "there is no direct I/O to align")
    found = f"{way.alignment} works, and a block's slot begins at a multiple of {PAGE_BYTES}"
    if claimed is None or claimed.offset == 0:
        return ok("alignment", f"{found}; statx claims nothing", works=way.alignment)
    facts = {"works": way.alignment, "claimed_offset": claimed.offset, "claimed_memory": claimed.memory}
    if claimed.offset < way.alignment:
        finding = f"statx claims {claimed.offset}, and only {way.alignment} works"
        return warning("alignment", finding, f"nothing to do: kvbm aligns to {PAGE_BYTES}", **facts)
    return ok("alignment", f"{found}; statx claims {claimed.offset} (memory {claimed.memory})", **facts)


def queue_checks(subject: Subject, report: Report) -> Iterator[Check]:
    """What NIXL needs of the kernel; threads need nothing."""
    assert report.io_uring is not None
    assert report.aio is not None
    wants_nixl = subject.disk is not None and subject.disk.io == "nixl"
    ways = {"io_uring": report.io_uring, "aio": report.aio}
    shown = ", ".join(f"{name} {'works' if way.works else way.reason}" for name, way in ways.items())
    facts = {name: way.works for name, way in ways.items()}
    if report.io_uring.works:
        yield ok("kernel queues", shown, **facts)
    elif report.aio.works:
        finding = f"{shown}: NIXL falls back to aio; `tiers.disk.io: threads` needs neither"
        yield warning("kernel queues", finding, **facts)
    else:
        say = failure if wants_nixl else warning
        yield say("kernel queues", f"{shown}: NIXL cannot work", "`tiers.disk.io: threads`", **facts)


def _speed(speed: Speed) -> Iterator[Check]:
    block = format_size(speed.block_bytes)
    for name, read, write in (
        ("sequential", speed.sequential_read, speed.sequential_write),
        ("random", speed.random_read, speed.random_write),
    ):
        finding = f"reads {rate(read)}, writes {rate(write)} in blocks of {block} by {speed.threads} threads"
        yield ok(name, finding, read_bytes_per_s=round(read), write_bytes_per_s=round(write), block=speed.block_bytes)
    yield ok("flush", f"fdatasync after a block: {speed.flush_s * 1000:.2f} ms", flush_s=speed.flush_s)


def _onboarding(subject: Subject, speed: Speed) -> Iterator[Check]:
    """Tokens that random reads bring, which is also the rate of an engine to which recomputing is as good."""
    if subject.sizing is None:
        remedy = "`--profile PROFILE`" if subject.resolved is None else None
        yield skipped("onboarding", "how many tokens that is depends on the size of a block", remedy)
        return
    tier = subject.sizing.disk or subject.sizing.host
    tokens_per_s = speed.random_read / tier.total_bytes * tier.token_count
    finding = f"{tokens_per_s:,.0f} tokens/s, {EXAMPLE_TOKENS} tokens in {EXAMPLE_TOKENS / tokens_per_s:.2f} s"
    yield ok("onboarding", finding, tokens_per_s=round(tokens_per_s))
    finding = f"an engine that prefills more than {tokens_per_s:,.0f} tokens/s is faster without the disk"
    yield ok("break-even", finding, tokens_per_s=round(tokens_per_s))
