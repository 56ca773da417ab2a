"""Mistakes of a profile that only this machine can find: model, interpreter, address, lengths, directory, workload.

`kvbm profile check`, `serve` and `bench` run the same checks. A mistake is shown at the place of its key. What the
machine lacks for a valid profile is found by machine_problems.py.
"""

from __future__ import annotations

import difflib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config.document import together
from kvbm.config.engine import SglangArguments, VllmArguments
from kvbm.config.flags import CONNECTOR, CONNECTOR_MODULE
from kvbm.config.sglang_options import LAYOUTS
from kvbm.config.values import count_of
from kvbm.engines.vllm.versions import VllmInstallation
from kvbm.errors import EnvironmentProblem, ProfileError, UsageError, reason_of
from kvbm.sizing import SizeUnknown, Sizing
from kvbm.sizing.families.facts import text_facts
from kvbm.tiers.disk.files import MAX_DIRECTORY_BYTES
from kvbm_cli.bench.workload.files import load_workload
from kvbm_cli.engine.engines import installation_of, knows_block_tokens, metrics_count
from kvbm_cli.engine.model_facts import model_facts
from kvbm_cli.engine.process import OWN_ADDRESS, choose_port
from kvbm_cli.profile.size import size_of
from kvbm_cli.profile.state_check import state_mistakes
from kvbm_cli.system.answering import answers
from kvbm_cli.system.filesystem import expanded, nearest_existing

MAX_PORT = 65535
NEAR = 0.8  # similarity of names of flags

if TYPE_CHECKING:
    from kvbm.config.load import Examined, ResolvedProfile


def check(resolved: ResolvedProfile, *, has_cache: bool = True, verifies_flags: bool = True) -> Sizing | SizeUnknown:
    """Return the sizes of a profile, or the reason why only the engine knows them. ProfileError for mistakes.

    Without `has_cache`, checks only what the engine needs.
    """
    sizing, mistakes = examine_here(resolved, has_cache=has_cache, verifies_flags=verifies_flags)
    if mistakes:
        raise together([*mistakes, *_of_workload(resolved)])
    assert sizing is not None, "a profile without mistakes has sizes or a reason why not"
    return sizing


def all_mistakes(
    examined: Examined, *, has_cache: bool = True
) -> tuple[Sizing | SizeUnknown | None, list[ProfileError]]:
    """Return the sizes if known, and all mistakes of a profile: its own, and in valid keys those that only this machine
    can find, including those of the workload of `kvbm bench`."""
    if examined.resolved is None:
        return None, list(examined.mistakes)
    sizing, found = examine_here(examined.resolved, has_cache=has_cache)
    found += _of_workload(examined.resolved)
    known = {getattr(one, "key", "") for one in examined.mistakes}
    return sizing, [*examined.mistakes, *(one for one in found if getattr(one, "key", None) not in known)]


def examine_here(
    resolved: ResolvedProfile, *, has_cache: bool = True, verifies_flags: bool = True
) -> tuple[Sizing | SizeUnknown | None, list[ProfileError]]:
    """Return the sizes, None if a mistake prevents computing them, and all mistakes found on this machine."""
    sizing: Sizing | SizeUnknown | None = None
    mistakes: list[ProfileError] = []
    try:
        sizing = size_of(resolved)
    except SizeUnknown as unknown:
        sizing = unknown
    except ProfileError as mistake:
        mistakes.append(mistake)
    if sizing is not None:
        mistakes += state_mistakes(resolved)
    if verifies_flags:
        mistakes += _unknown_flags(resolved)
    of_cache = (require_arguments, _require_metrics, _require_directory) if has_cache else ()
    for require in (_require_program, _require_address, *of_cache):
        try:
            require(resolved)
        except ProfileError as mistake:
            mistakes.append(mistake)
    if sizing is not None and not isinstance(sizing, SizeUnknown):
        try:
            _require_length(resolved, sizing)
        except ProfileError as mistake:
            mistakes.append(mistake)
    return sizing, mistakes


def require_log(path: Path) -> None:
    """EnvironmentProblem for a log that cannot be written, before anything is created."""
    if (reason := _reason_not_writable(path)) is not None:
        raise EnvironmentProblem(
            f"cannot write the engine's log `{path}`: {reason}",
            hint="name another file with `--log FILE`, or remove `--log`",
        )


def _reason_not_writable(path: Path) -> str | None:
    """Return why the file cannot be written or created, None if it can."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        holder = nearest_existing(Path(os.path.abspath(path)).parent)
        if not os.path.isdir(holder):
            return f"{holder} is not a directory"
        if os.statvfs(holder).f_flag & os.ST_RDONLY:
            return "read-only file system"
        return None if os.access(holder, os.W_OK | os.X_OK) else "permission denied"
    except NotADirectoryError:
        return f"{nearest_existing(Path(os.path.abspath(path)))} is not a directory"
    except OSError as error:
        return reason_of(error)
    if stat.S_ISDIR(mode):
        return "is a directory"
    if not stat.S_ISREG(mode) and os.path.realpath(path) != os.devnull:
        return "is not a regular file"
    return None if os.access(path, os.W_OK) else "permission denied"


def require_workload(resolved: ResolvedProfile) -> None:
    """ProfileError for a workload of `kvbm bench` that is missing or invalid."""
    if (workload := resolved.profile.bench.workload) is not None:
        try:
            load_workload(workload)
        except UsageError as error:
            raise resolved.mistake("bench.workload", error.message, hint=error.hint) from None


def _of_workload(resolved: ResolvedProfile) -> list[ProfileError]:
    try:
        require_workload(resolved)
    except ProfileError as mistake:
        return [mistake]
    return []


def _require_program(resolved: ResolvedProfile) -> None:
    python = resolved.profile.engine.python
    if python is not None and shutil.which(python) is None:
        hint = "name an executable, or remove `engine.python` to use the interpreter of `kvbm`"
        raise resolved.mistake("engine.python", f"`engine.python`: `{python}` is not an executable", hint=hint)


def _unknown_flags(resolved: ResolvedProfile) -> Iterator[ProfileError]:
    """Yield the flags that the vLLM in the profile's interpreter does not have."""
    profile = resolved.profile
    found = installation_of(profile) if profile.engine.kind == "vllm" else None
    if not isinstance(found, VllmInstallation):
        return
    for name in profile.engine.arguments.model_dump(exclude_none=True):
        if found.lacks(name):
            alike = [flag for flag in found.flags if flag.startswith("disable_") == name.startswith("disable_")]
            near = difflib.get_close_matches(name, alike, n=1, cutoff=NEAR)
            hint = f"did you mean `{near[0]}`?" if near else "remove it, or start vLLM with it: `kvbm serve --force`"
            yield resolved.mistake(f"engine.arguments.{name}", f"vLLM {found.version} has no flag `{name}`", hint=hint)


def require_arguments(resolved: ResolvedProfile) -> None:
    """ProfileError for arguments of an engine with which kvbm cannot keep its blocks."""
    _require_connector(resolved)
    _require_storable(resolved)


def _require_connector(resolved: ResolvedProfile) -> None:
    """ProfileError for the connector of another cache, which vLLM can only run without kvbm."""
    arguments = resolved.profile.engine.arguments
    transfer = (arguments.kv_transfer_config or {}) if isinstance(arguments, VllmArguments) else {}
    for name, ours in (("kv_connector", CONNECTOR), ("kv_connector_module_path", CONNECTOR_MODULE)):
        value = transfer.get(name, ours)
        if value != ours:
            message = f"`kv_transfer_config.{name}` must be `{ours}`, not `{value}`"
            hint = _CONNECTOR_HINTS.get(str(transfer.get("kv_connector")), _OTHER_CONNECTOR)
            raise resolved.mistake("engine.arguments.kv_transfer_config", message, hint=hint)


def _require_storable(resolved: ResolvedProfile) -> None:
    """ProfileError for an SGLang whose pages kvbm cannot store: SGLang would end only after it has loaded the model."""
    arguments = resolved.profile.engine.arguments
    if not isinstance(arguments, SglangArguments):
        return
    given = {**arguments.model_dump(), **(arguments.hicache_storage_backend_extra_config or {})}
    layout = given.get("hicache_mem_layout", LAYOUTS[0])
    for name, is_refused, reason in (
        (
            "enable_hierarchical_cache",
            not arguments.enable_hierarchical_cache,
            "it stores pages of SGLang's host memory",
        ),
        ("hicache_mem_layout", layout not in LAYOUTS, f"it can store {', '.join(f'`{one}`' for one in LAYOUTS)}"),
        ("dcp_size", given.get("dcp_size", 1) != 1, "it does not support decode context parallelism of SGLang"),
        ("tp_lcm_size", "tp_lcm_size" in given, "it does not split pages for engines with another number of ranks"),
    ):
        if is_refused:
            place = "hicache_storage_backend_extra_config" if name == "tp_lcm_size" else name
            message = f"`{name}: {str(given[name]).lower()}` cannot be used with kvbm: {reason}"
            raise resolved.mistake(f"engine.arguments.{place}", message, hint=_WITHOUT_KVBM)


_WITHOUT_KVBM = "remove it, or start SGLang without kvbm: `kvbm serve --baseline`"
_OTHER_CONNECTOR = "remove it, or keep it and start vLLM without kvbm: `kvbm serve --baseline`"
_PD_HINT = "remove it; `disaggregated: {prefill: 1, decode: 1}` starts engines with `PdConnector` and `NixlConnector`"
_CONNECTOR_HINTS = {
    "PdConnector": _PD_HINT,
    "NixlConnector": _PD_HINT,
    "MultiConnector": "a profile has one connector; `MultiConnector` with `DynamoConnector` works with vLLM's own "
    "command line: `vllm serve MODEL --kv-transfer-config JSON`, see docs/guide/vllm.md",
}


def _require_address(resolved: ResolvedProfile) -> None:
    try:
        choose_port(resolved.profile.server.host, 0)
    except EnvironmentProblem as error:
        raise resolved.mistake("server.host", error.message, hint=OWN_ADDRESS) from None


def _require_metrics(resolved: ResolvedProfile) -> None:
    """Each engine with a cache serves its metrics on a port of its own."""
    ports = metrics_ports(resolved)
    if ports and ports[-1] > MAX_PORT:
        needed = f"{len(ports)} engines need ports up to {ports[-1]}"
        message = f"`metrics.port` is too high: {needed}, but the maximum is {MAX_PORT}"
        raise resolved.mistake("metrics.port", message)
    if ports and resolved.profile.metrics.host is not None:
        try:
            choose_port(resolved.profile.metrics.host, 0)
        except EnvironmentProblem as error:
            hint = "set `metrics.host` to an address of this machine, or remove it to use `server.host`"
            raise resolved.mistake("metrics.host", error.message, hint=hint) from None


def metrics_ports(resolved: ResolvedProfile) -> range:
    metrics = resolved.profile.metrics
    is_fixed = metrics.serve and metrics.port
    return range(metrics.port, metrics.port + metrics_count(resolved.profile)) if is_fixed else range(0)


def _require_length(resolved: ResolvedProfile, sizing: Sizing) -> None:
    """ProfileError if the maximum length exceeds the positions of the model or the tokens of G1."""
    engine = resolved.profile.engine
    name = engine.arguments.LENGTH
    key, length = f"engine.arguments.{name}", count_of(getattr(engine.arguments, name))
    positions = text_facts(model_facts(engine.model, kind=engine.kind)).get("max_position_embeddings")
    limits = [(positions, "the model accepts", "")]
    if sizing.device is not None and knows_block_tokens(resolved.profile):
        reserved_tokens = sizing.block_tokens if engine.kind == "vllm" else 0  # vLLM reserves one block
        holds = sizing.device.token_count - reserved_tokens
        limits.append((holds, "G1 holds", f", or raise `{sizing.device.set_by}`"))
    for limit, holder, or_raise in limits:
        if length is not None and isinstance(limit, int) and length > limit:
            message = f"`{name}` is {length} tokens, but {holder} at most {limit}"
            raise resolved.mistake(key, message, hint=f"lower `{key}`{or_raise}")


def _require_directory(resolved: ResolvedProfile) -> None:
    """ProfileError for a directory that cannot be used; else it would fail only after the model is loaded."""
    disk, metrics = resolved.profile.tiers.disk, resolved.profile.metrics
    if disk is not None and answers(directory := expanded(disk.directory)):  # else problems_here says so
        reason = _reason_not_private(directory) or _reason_too_long(directory) or _reason_not_usable(directory)
        _require_none(resolved, "tiers.disk.directory", reason)
    if metrics.record:
        directory = expanded(metrics.record_directory)
        reason = _reason_not_usable(directory) or disk_state(directory)
        _require_none(resolved, "metrics.record_directory", reason)


def _require_none(resolved: ResolvedProfile, key: str, reason: str | None) -> None:
    if reason is not None:
        hint = f"set `{key}` to another directory; `kvbm doctor --dir DIR` checks one"
        raise resolved.mistake(key, f"`{key}`: {reason}", hint=hint)


def _reason_not_private(directory: Path) -> str | None:
    """Return why the disk tier refuses an existing directory, None if it does not."""
    try:
        mode = os.lstat(directory).st_mode
    except OSError:
        return None  # missing, or not usable for another reason
    if stat.S_ISLNK(mode):
        return f"{directory} is a symbolic link, which is not followed"
    if stat.S_ISDIR(mode) and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return f"{directory} is writable by everyone (mode {stat.S_IMODE(mode):04o})"
    return None


def _reason_too_long(directory: Path) -> str | None:
    length = len(os.fsencode(directory))
    if length <= MAX_DIRECTORY_BYTES:
        return None
    return f"the path has {length} bytes; the index of the disk tier allows {MAX_DIRECTORY_BYTES}"


def disk_state(directory: Path) -> str | None:
    """Return why files cannot be created in the directory at present, None if they can."""
    holder = nearest_existing(directory)
    try:
        if os.statvfs(holder).f_flag & os.ST_RDONLY:
            return f"{holder} is on a read-only file system"
    except OSError as error:
        return f"cannot use {holder}: {reason_of(error)}"
    return None if os.access(holder, os.W_OK | os.X_OK) else f"{holder} is not writable"


def _reason_not_usable(directory: Path) -> str | None:
    """Return why no files can ever be created in the directory, None if they can."""
    holder = nearest_existing(directory)
    try:
        mode = os.stat(holder).st_mode
    except OSError as error:
        may_pass = error.errno in (errno.EACCES, errno.EIO, errno.ESTALE)
        return None if may_pass else f"cannot use {holder}: {reason_of(error)}"
    if not stat.S_ISDIR(mode):
        return f"{holder} is not a directory"
    try:
        os.lstat(directory)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"the name of {directory} is too long"
    return None
