"""Bugs in what the series by tier and engine count."""

from __future__ import annotations

from mutant import Mutant

SERIES = "tests/observe/test_series.py"
CONTROL = "tests/observe/test_control_server.py"

MUTANTS = (
    Mutant(
        name="series-show-the-age-of-the-newest",
        bug="the oldest transfer of a queue seems to be as young as the newest",
        file="kvbm/leader/onboards.py",
        old="return blocks, copies[0].born_s if copies else None",
        new="return blocks, copies[-1].born_s if copies else None",
        fails="tests/observe/test_series.py -k oldest_of_several",
    ),
    Mutant(
        name="series-mix-engines",
        bug="all engines of a server have the same label",
        file="kvbm/observe/telemetry.py",
        old="lambda: {self._engine: EngineReport.of(leader)}",
        new="lambda: {0: EngineReport.of(leader)}",
        fails="tests/observe/test_telemetry.py -k label",
    ),
    Mutant(
        name="series-count-external-tokens-twice",
        bug="tokens from the disk count as those of host memory too",
        file="kvbm/metrics.py",
        old="self.prompt_host_tokens += external - disk - shared",
        new="self.prompt_host_tokens += external",
        fails=f"{SERIES} -k add_up",
    ),
    Mutant(
        name="series-count-evictions-of-free-slots",
        bug="each write to the disk seems to evict a block",
        file="kvbm/leader/disk_tier.py",
        old="evicted = max(0, len(source.slots) - self.store.free)",
        new="evicted = len(source.slots)",
        fails=f"{SERIES} -k eviction",
    ),
    Mutant(
        name="series-show-counts-of-single-buckets",
        bug="a bucket does not include the shorter durations",
        file="kvbm/observe/series.py",
        old="        total += count\n",
        new="        total = count\n",
        fails=f"{SERIES} -k include_the_shorter",
    ),
    Mutant(
        name="top-counts-backwards-after-a-restart",
        bug="after a restart of an engine, its rates are negative",
        file="kvbm_cli/top/figures.py",
        old="NOTHING) if _has_restarted(old.page, new.page) else old, new)",
        new="NOTHING) if False else old, new)",
        fails="tests/top/test_figures.py -k restart",
    ),
    Mutant(
        name="top-obeys-text-of-an-engine",
        bug="the name of a model can control the terminal",
        file="kvbm_cli/top/screen.py",
        old="_cut(printable(text), width)",
        new="_cut(text, width)",
        fails="tests/top/test_screen.py -k controls",
    ),
    Mutant(
        name="runs-keep-the-target-of-an-ended-run",
        bug="Prometheus scrapes an engine that was stopped, and the alert fires",
        file="kvbm_cli/runs/run_directory.py",
        old="for left in (self.path / TARGETS, *self.path.glob(CONTROL_SOCKETS)):",
        new="for left in self.path.glob(CONTROL_SOCKETS):",
        fails="tests/cli/test_runs.py -k not_after_its_end",
    ),
    Mutant(
        name="control-answers-every-user",
        bug="another user may clear the cache if the modes let it reach the socket",
        file="kvbm/observe/control_server.py",
        old="if uid not in (os.geteuid(), 0):",
        new="if False:",
        fails=f"{CONTROL} -k another_user",
    ),
    Mutant(
        name="control-route-takes-a-part-of-the-token",
        bug="the first characters of the token suffice on the metrics port",
        file="kvbm/observe/control_route.py",
        old="if not hmac.compare_digest(given, self._authorization):",
        new="if not self._authorization.startswith(given):",
        fails=f"{CONTROL} -k wrong_token",
    ),
    Mutant(
        name="control-does-not-wake-the-engine",
        bug="an idle engine never answers",
        file="kvbm/observe/control_desk.py",
        old="        if self._wake is not None:\n",
        new="        if False:\n",
        fails=f"{CONTROL} -k idle_engine_answers",
    ),
    Mutant(
        name="control-runs-a-whole-verb-in-one-step",
        bug="a step counts the blocks of every slot",
        file="kvbm/leader/control.py",
        old="and self._run_piece() and self._clock() < end_s:",
        new="and self._run_piece():",
        fails="tests/leader/test_control.py -k in_pieces",
    ),
    Mutant(
        name="control-leaves-what-is-in-flight",
        bug="a block of a cleared tenant is registered when its copy ends",
        file="kvbm/leader/leader.py",
        old="            self._offloads.discard_tenant(tenant)",
        new="            pass",
        fails="tests/leader/test_control.py -k in_flight",
    ),
    Mutant(
        name="control-leaves-reads-in-flight",
        bug="a read from disk brings blocks of a cleared tenant back",
        file="kvbm/leader/open_reads.py",
        old="fetch.is_void |= tenant is None or fetch.tenant in (None, tenant)",
        new="fetch.is_void |= tenant is None",
        fails="tests/leader/test_control.py -k brings_back",
    ),
    Mutant(
        name="labels-keep-a-former-tenant",
        bug="a block without a tenant counts as that of the one whose block was in its slot before",
        file="kvbm/leader/slot_labels.py",
        old="if not tenant and not self._numbers:",
        new="if not tenant:",
        fails="tests/leader/test_control.py -k labels",
    ),
)
