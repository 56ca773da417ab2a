"""`kvbm cache`: its subcommands with their options and help."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from kvbm.errors import UsageError
from kvbm_cli.profile.options import profile_option
from kvbm_cli.runs.app import living_runs
from kvbm_cli.terminal.command_line import Command
from kvbm_cli.terminal.options import JsonOption, argument, command_group, flag, option, path_option

cache_app = command_group("List, verify and clear caches.")
RUN_HELP = "Name of a running engine (`demo-1`) or of its profile [default: caches on disk]."
CachedRunArgument = Annotated[str | None, argument("RUN", RUN_HELP, living_runs)]
DIR_HELP = "Directory of the caches [default: from the profile, else ~/.cache/kvbm]."
CacheDirectoryOption = Annotated[Path | None, path_option("--dir", "DIR", DIR_HELP)]
PROFILE_HELP = "Use the `tiers.disk.directory` of this profile. May be repeated; the last one wins."
CacheProfileOption = Annotated[list[str] | None, profile_option(PROFILE_HELP)]
STORE_HELP = "Store of a shared tier, such as s3://bucket/prefix or file:///directory."
StoreOption = Annotated[str | None, option("--url", "URL", STORE_HELP)]
NAMESPACE_HELP = "Only namespaces that begin with HEX; requires --url."
NamespaceOption = Annotated[str | None, option("--namespace", "HEX", NAMESPACE_HELP)]
ModelOption = Annotated[str | None, option("--model", "NAME", "Only this model, as `ls` shows it; requires --url.")]
TENANT_HELP = "Only objects of requests with this cache salt; requires --url."
TenantOption = Annotated[str | None, option("--tenant", "SALT", TENANT_HELP)]
AGE_HELP = "Only objects older than this, such as `12h` or `7d`; requires --url."
AgeOption = Annotated[str | None, option("--older-than", "AGE", AGE_HELP)]


@cache_app.command("ls", cls=Command)
def cache_ls(
    run: CachedRunArgument = None,
    dir_: CacheDirectoryOption = None,
    profile: CacheProfileOption = None,
    url: StoreOption = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tenant: TenantOption = None,
    older_than: AgeOption = None,
    json: JsonOption = False,
) -> int:
    """List caches. With RUN, list the blocks of a running engine; with --url, objects of a store."""
    options = {"--namespace": namespace, "--model": model, "--tenant": tenant, "--older-than": older_than}
    if run is not None:
        _require_none({"--dir": dir_, "--profile": profile, "--url": url, **options}, f"{NOT_WITH_RUN} `{run}`")
        from kvbm_cli.cache.live_caches import list_blocks

        return list_blocks(run, as_json=json)
    if url is None:
        _require_none(options, *NO_STORE)
        from kvbm_cli.cache.disk_caches import list_caches

        return list_caches(dir_, profile or (), as_json=json)
    _require_none({"--dir": dir_, "--profile": profile}, NOT_WITH_URL)
    from kvbm_cli.cache.store_objects import list_objects
    from kvbm_cli.cache.store_selection import StoreRequest

    return list_objects(StoreRequest(url, namespace, model, tenant, older_than), as_json=json)


def _require_none(options: Mapping[str, object], why: str, hint: str = "remove one of them") -> None:
    """UsageError for an option that was given. `why` is the rest of its message."""
    for name, value in options.items():
        if value not in (None, False, []):
            raise UsageError(f"`{name}` {why}", hint=hint)


NO_STORE = ("requires a store", "add `--url URL`")
NOT_WITH_RUN = "cannot be used with the run"
NOT_WITH_URL = "and `--url` cannot be used together"


@cache_app.command("verify", cls=Command)
def cache_verify(
    dir_: CacheDirectoryOption = None,
    profile: CacheProfileOption = None,
    url: StoreOption = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tenant: TenantOption = None,
    older_than: AgeOption = None,
    sample: Annotated[
        int | None, option("--sample", "N", "Verify only N random objects; requires --url.", min=1)
    ] = None,
    key_file: Annotated[
        Path | None,
        path_option("--key-file", "FILE", "Secret of protected objects [default: KVBM_SHARED_KEY]; requires --url."),
    ] = None,
    delete_bad: Annotated[bool, flag("--delete-bad", "Delete bad objects; requires --url.")] = False,
    json: JsonOption = False,
) -> int:
    """Verify every block of caches or objects. Exits with 1 if one is damaged.

    Damaged blocks of a cache on disk are dropped."""
    options = {"--namespace": namespace, "--model": model, "--tenant": tenant, "--older-than": older_than}
    if url is None:
        more = {"--sample": sample, "--key-file": key_file, "--delete-bad": delete_bad}
        _require_none({**options, **more}, *NO_STORE)
        from kvbm_cli.cache.disk_caches import verify_caches

        return verify_caches(dir_, profile or (), as_json=json)
    _require_none({"--dir": dir_, "--profile": profile}, NOT_WITH_URL)
    from kvbm_cli.cache.store_selection import StoreRequest
    from kvbm_cli.cache.store_verification import verify_objects

    request = StoreRequest(url, namespace, model, tenant, older_than)
    return verify_objects(request, key_file=key_file, sample=sample, deletes_bad=delete_bad, as_json=json)


@cache_app.command("purge", cls=Command)
def cache_purge(
    url: Annotated[str, option("--url", "URL", STORE_HELP)],
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tenant: TenantOption = None,
    older_than: AgeOption = None,
    dry_run: Annotated[bool, flag("--dry-run", "Show what would be deleted, and delete nothing.")] = False,
    yes: Annotated[bool, flag("--yes", "Do not ask for confirmation.")] = False,
) -> int:
    """Delete objects of a store."""
    from kvbm_cli.cache.store_objects import purge
    from kvbm_cli.cache.store_selection import StoreRequest

    request = StoreRequest(url, namespace, model, tenant, older_than)
    return purge(request, is_sure=yes, is_dry_run=dry_run)


@cache_app.command("clear", cls=Command)
def cache_clear(
    run: CachedRunArgument = None,
    dir_: CacheDirectoryOption = None,
    profile: CacheProfileOption = None,
    salt: Annotated[
        str | None, option("--salt", "SALT", "Remove only blocks of requests with this cache salt.")
    ] = None,
    tier: Annotated[str | None, option("--tier", "TIER", "Clear only G2 or G3; requires RUN.")] = None,
    tenant_digest: Annotated[
        str | None, option("--tenant-digest", "HEX", "Like --salt, as `ls RUN --json` names a tenant; requires RUN.")
    ] = None,
    yes: Annotated[bool, flag("--yes", "Do not ask for confirmation.")] = False,
) -> int:
    """Remove caches. With RUN, remove blocks of a running engine; else refuse a cache that an engine uses."""
    if run is not None:
        _require_none({"--dir": dir_, "--profile": profile}, f"{NOT_WITH_RUN} `{run}`")
        from kvbm_cli.cache.live_caches import clear_blocks

        return clear_blocks(run, tier=tier, salt=salt, digest=tenant_digest, is_sure=yes)
    hint = "add the name of its run: `kvbm status`"
    _require_none({"--tier": tier, "--tenant-digest": tenant_digest}, "requires a running engine", hint)
    from kvbm_cli.cache.disk_caches import clear_caches

    return clear_caches(dir_, profile or (), salt=salt, is_sure=yes)


RunningArgument = Annotated[str, argument("RUN", "Name of a running engine, such as `demo-1`.", living_runs)]
TextOption = Annotated[str | None, option("--text", "TEXT", "The beginning of prompts, as text.")]
TokensOption = Annotated[str | None, option("--tokens", "ID,ID", "The beginning of prompts, as token ids.")]
PrefixFileOption = Annotated[Path | None, path_option("--file", "FILE", "The beginning of prompts, a file of UTF-8.")]
SaltOption = Annotated[str | None, option("--salt", "SALT", "Cache salt of the requests.")]


@cache_app.command("pin", cls=Command)
def cache_pin(
    run: RunningArgument,
    text: TextOption = None,
    tokens: TokensOption = None,
    file: PrefixFileOption = None,
    time: Annotated[str, option("--for", "TIME", "How long, such as `10m` or `2h`.")] = "1h",
    salt: SaltOption = None,
) -> int:
    """Hold prompts in host memory for a time."""
    from kvbm_cli.cache import live_chains

    return live_chains.pin(run, live_chains.Prefix(text, tokens, file, salt), time=time)


@cache_app.command("prefetch", cls=Command)
def cache_prefetch(
    run: RunningArgument,
    text: TextOption = None,
    tokens: TokensOption = None,
    file: PrefixFileOption = None,
    salt: SaltOption = None,
) -> int:
    """Bring prompts from lower tiers."""
    from kvbm_cli.cache import live_chains

    return live_chains.prefetch(run, live_chains.Prefix(text, tokens, file, salt))


@cache_app.command("release", cls=Command)
def cache_release(
    run: RunningArgument,
    pin: Annotated[str | None, argument("PIN", "Name of a pin, as `pin` shows it [default: all pins].")] = None,
) -> int:
    """End pins."""
    from kvbm_cli.cache import live_chains

    return live_chains.release(run, pin)


@cache_app.command("limit", cls=Command)
def cache_limit(
    run: RunningArgument,
    percent: Annotated[str, argument("PERCENT", "Part of host memory, such as `10%`; `0%` for none.")],
    salt: SaltOption = None,
    tenant_digest: Annotated[
        str | None, option("--tenant-digest", "HEX", "Like --salt, as `ls RUN --json` names a tenant.")
    ] = None,
) -> int:
    """Limit what hints may retain.

    The limit is a part of host memory, for each tenant or for one."""
    from kvbm_cli.cache import live_chains

    return live_chains.limit(run, percent, salt=salt, digest=tenant_digest)


@cache_app.command("export-stats", cls=Command)
def cache_export_stats(
    dir_: CacheDirectoryOption = None,
    profile: CacheProfileOption = None,
    format_: Annotated[str, option("--format", "FORMAT", "Output format: json or csv.")] = "json",
    output: Annotated[Path | None, path_option("--output", "FILE", "File to write [default: stdout].")] = None,
) -> None:
    """Export statistics as JSON or CSV."""
    from kvbm_cli.cache.disk_caches import export_stats

    export_stats(dir_, profile or (), form=format_, output=output)
