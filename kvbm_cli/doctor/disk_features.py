"""Checks of what a filesystem supports, from the report of disk_probe.py: fallocate, direct I/O, speed.

A missing feature is a failure if the disk tier of the profile requires it, else a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbm.config.sizes import format_size
from kvbm_cli.doctor.check import OTHER_DIRECTORY, DoctorContext
from kvbm_cli.doctor.probes.disk import DiskReport, RecommendedSettings
from kvbm_cli.doctor.probes.disk_file import DirectIO
from kvbm_cli.doctor.probes.disk_speed import Speed
from kvbm_cli.profile.machine_check import Check, Severity, failure, ok, skipped, warning
from kvbm_cli.terminal.quantities import shown_rate

EXAMPLE_TOKENS = 4000


def checks(
    context: DoctorContext, report: DiskReport, needs: RecommendedSettings, needed_bytes: int | None
) -> Iterator[Check]:
    """`needs` are the recommended settings, `needed_bytes` the size of the tier."""
    yield _fallocate(context, report, needs, needed_bytes)
    assert report.by_open is not None
    assert report.by_fcntl is not None
    yield from _direct(context, report.by_open, report.by_fcntl, needs)
    if report.transfers is not None and not report.transfers.works:
        finding = f"transferring many blocks fails: {report.transfers.reason}"
        yield failure("speed", finding, f"check quotas, limits and the kernel log, or {OTHER_DIRECTORY}")
    elif report.speed is None:
        yield skipped("speed", f"not measured: {report.reason}")
    else:
        yield from _speed(report.speed)
        yield from _onboarding(context, report.speed)


def _fallocate(
    context: DoctorContext, report: DiskReport, needs: RecommendedSettings, needed_bytes: int | None
) -> Check:
    assert report.fallocate is not None
    if report.fallocate.works:
        return ok("fallocate", "works")
    if not needs.zerofill:
        return failure("fallocate", f"fails: {report.fallocate.reason}", OTHER_DIRECTORY)
    finding = f"{report.fallocate.reason}: space must be allocated by writing zeros"
    if needed_bytes is not None and report.speed is not None:
        finding += f", {needed_bytes / report.speed.sequential_write:.0f} s at the first start"
    if context.disk is not None and context.disk.zerofill:
        return ok("fallocate", finding)
    check = failure if context.disk is not None else warning
    return check("fallocate", finding, "set `tiers.disk.zerofill: true`")


def _direct(
    context: DoctorContext, by_open: DirectIO, by_fcntl: DirectIO, needs: RecommendedSettings
) -> Iterator[Check]:
    disk = context.disk
    wanted = None if disk is None or not disk.o_direct else disk.allocator
    remedy = f"set `tiers.disk.allocator: {needs.allocator}`" if needs.o_direct else "set `tiers.disk.o_direct: false`"
    for name, way, allocator in (("by open", by_open, "open-direct"), ("by fcntl", by_fcntl, "default")):
        name = f"O_DIRECT {name}"
        facts = {"alignment": way.alignment, "is_cached": way.is_cached}
        is_trap = way.works and not by_open.works
        if is_trap:
            finding = "accepted, but open refuses it: fcntl does not ask the filesystem"
        elif not way.works:
            finding = f"fails: {way.reason}"
        elif way.is_cached:
            finding = "accepted, but the page cache is still used"
        else:
            finding = f"written and read back at an alignment of {way.alignment}"
        if way.works and not is_trap:
            state = Severity.OK
        else:
            state = Severity.FAILURE if wanted == allocator else Severity.WARNING
        yield Check(name, state, finding, None if state is Severity.OK else remedy, facts)
    if disk is not None and not disk.o_direct and needs.o_direct and not by_open.is_cached:
        finding = "off although it works: the page cache will hold a second copy of every block"
        yield warning("O_DIRECT", finding, "set `tiers.disk.o_direct: true`")


def _speed(speed: Speed) -> Iterator[Check]:
    block = format_size(speed.block_bytes)
    for name, read, write in (
        ("sequential", speed.sequential_read, speed.sequential_write),
        ("random", speed.random_read, speed.random_write),
    ):
        finding = f"reads {shown_rate(read)}, writes {shown_rate(write)} ({block} blocks, {speed.threads} threads)"
        yield ok(name, finding, read_bytes_per_s=round(read), write_bytes_per_s=round(write), block=speed.block_bytes)
    yield ok("flush", f"fdatasync after a block: {speed.flush_s * 1000:.2f} ms", flush_s=speed.flush_s)


def _onboarding(context: DoctorContext, speed: Speed) -> Iterator[Check]:
    """Report the tokens/s of random reads, which is also the prefill rate above which recomputing is faster."""
    if context.sizing is None:
        remedy = "add `--profile PROFILE`" if context.resolved is None else None
        yield skipped("onboarding", "tokens/s depend on the block size, which is unknown", remedy)
        return
    tier = context.sizing.disk or context.sizing.host
    tokens_per_s = speed.random_read / tier.total_bytes * tier.token_count
    finding = f"{tokens_per_s:,.0f} tokens/s, {EXAMPLE_TOKENS} tokens in {EXAMPLE_TOKENS / tokens_per_s:.2f} s"
    yield ok("onboarding", finding, tokens_per_s=round(tokens_per_s))
    finding = f"above a prefill rate of {tokens_per_s:,.0f} tokens/s, recomputing is faster than reading from disk"
    yield ok("break-even", finding, tokens_per_s=round(tokens_per_s))
