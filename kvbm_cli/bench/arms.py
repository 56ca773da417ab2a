"""Arms: the configurations of the engine that an experiment compares, and the order of their runs.

    kvbm bench --profile demo                                     kvbm against baseline, the same engine without kvbm
    kvbm bench --profile demo --compare demo-disk                 demo against demo-disk, both with kvbm
    kvbm bench --profile demo --compare baseline:other            kvbm against the engine of `other` without kvbm
    kvbm bench --profile demo --compare 'name=vllm serve ...'     kvbm against the engine that this command line starts
    kvbm bench --compare new=http://host:1 --compare old=http://host:2    two running servers

The first arm is measured; the others are its references. `floor` is the engine of the profile without kvbm and with a
G1 that holds everything. The name of an arm is also part of the names of its runs and files.

`comparison_of` resolves `--profile` and `--compare` to arms, and checks that they can be compared.
"""

from __future__ import annotations

import difflib
import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from kvbm.config.document import together
from kvbm.config.files import require_file
from kvbm.config.layers import find
from kvbm.errors import KvbmError, ProfileError, UsageError
from kvbm.text.outside import without_secret_value
from kvbm_cli.package_data import profiles_directory
from kvbm_cli.profile.diff import differences, value_of
from kvbm_cli.profile.import_command import examined_command, notes_of
from kvbm_cli.profile.machine_check import require_none
from kvbm_cli.profile.machine_problems import problems_here
from kvbm_cli.profile.preflight import check, examine_here
from kvbm_cli.profile.resolve import resolve_to_start
from kvbm_cli.system.tls import is_https, tls_context
from kvbm_cli.terminal.console import print_note

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import Profile

RECORDING = "recording"
BASELINE, KVBM, FLOOR = "baseline", "kvbm", "floor"
RESERVED = (RECORDING, BASELINE, KVBM, FLOOR)
DEFAULT_PAIRS = {"in_turn": 3, "interleaved": 1}
# Arguments of an engine whose product is the number of its accelerators; the last three are SGLang's.
RANKS = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("tp_size", "pp_size", "dp_size"),
)

# Keys whose values may be right on another machine.
OF_MACHINE = ("engine.model", "engine.python", "server.host", "metrics.host", "tiers.disk.directory")

ArmKind = Literal["kvbm", "baseline", "profile", "floor", "url"]
_URL = re.compile(r"(?:(?P<name>[A-Za-z0-9_-]{1,40})=)?(?P<url>https?://.*)")
_COMMAND = re.compile(r"(?:(?P<name>[a-z0-9_-]{1,40})=)?(?P<command>\S+\s.*)", re.DOTALL)
# Flags by which an engine has another cache; an arm cannot have them, because kvbm sets them.
_FLAG_OF_A_CACHE = re.compile(r"--(?:kv[-_]offloading[-_]|hicache[-_]storage[-_]backend)[\w-]*")
_PUT_BACK = re.compile(r"not carried over: `(?:--kv-transfer-config(?:`| with )|LMCACHE_[^`$]*`)")
_ADDRESS = re.compile(r"[A-Za-z0-9.-]+:[0-9]{1,5}(?:/\S*)?")


@dataclass(frozen=True, slots=True)
class Arm:
    """`differences` are the keys in which the profile of a reference differs from the measured one's."""

    name: str
    kind: ArmKind
    resolved: ResolvedProfile | None = None
    url: str | None = None
    differences: Mapping[str, tuple[object, object]] = field(default_factory=dict)

    @property
    def has_kvbm(self) -> bool:
        return self.kind in ("kvbm", "profile")

    @property
    def engine_differences(self) -> tuple[str, ...]:
        """Keys of the engine in which this reference differs; its answers may then differ without being wrong."""
        return tuple(key for key in self.differences if key.startswith("engine."))

    @property
    def ranks(self) -> int:
        """Accelerators of the engine, by its profile: 1 for a server by URL."""
        if self.resolved is None:
            return 1
        arguments = self.resolved.profile.engine.arguments
        return math.prod(getattr(arguments, name, None) or 1 for name in RANKS)

    def to_json(self) -> dict[str, object]:
        return {
            **({"ranks": self.ranks} if self.ranks > 1 else {}),
            "kind": self.kind,
            "profile": self.resolved.name if self.resolved else None,
            "url": self.url,
            "differences": {
                key: [without_secret_value(key, value) for value in values] for key, values in self.differences.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """`measured` is compared with each reference: "faster" means that `measured` is faster.

    `ca_file` has the certificates for servers by `https`; empty: those of the system.
    """

    measured: Arm
    references: tuple[Arm, ...]
    floor: Arm | None
    ca_file: str = ""

    @property
    def arms(self) -> tuple[Arm, ...]:
        """All arms; the first reference comes first, because its answers are what others are compared with."""
        floor = (self.floor,) if self.floor else ()
        return (*self.references[:1], self.measured, *self.references[1:], *floor)

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def is_of_urls(self) -> bool:
        return all(arm.kind == "url" for arm in self.arms)


@dataclass(frozen=True, slots=True)
class ArmGroup:
    """Arms that run at the same time, in repetition `pair`."""

    pair: int
    arms: tuple[str, ...]


def groups(comparison: Comparison, *, interleaved: bool, pairs: int, seed: int) -> list[ArmGroup]:
    """Return the order of all runs of a cell.

    In turn, arms alternate: A B, B A, A B, ... or the reverse, which the seed decides. So a machine that slowly gets
    slower changes no ratio. The floor runs once, at the end of the first pair. Interleaved, all arms run in each pair.
    """
    names = [arm.name for arm in comparison.arms]
    if interleaved:
        return [ArmGroup(pair, tuple(names)) for pair in range(1, pairs + 1)]
    compared = [name for name in names if comparison.floor is None or name != comparison.floor.name]
    is_reversed = random.Random(seed).random() < 0.5
    result = []
    for pair in range(1, pairs + 1):
        order = compared[::-1] if is_reversed else compared
        result += [ArmGroup(pair, (name,)) for name in order]
        if pair == 1 and comparison.floor is not None:
            result.append(ArmGroup(pair, (comparison.floor.name,)))
        is_reversed = not is_reversed
    return result


def free_name(wanted: str, taken: Sequence[str]) -> str:
    """Return a name that is safe as a directory and in an HTTP header; a number is appended where it is taken."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", wanted).strip("-")[:40] or "arm"
    candidates = (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in candidates if candidate not in taken)


BASELINE_OF = f"{BASELINE}:"


def comparison_of(
    profiles: Sequence[str],
    overrides: Sequence[str],
    compare: Sequence[str],
    ca_file: Path | None = None,
    *,
    has_floor: bool = True,
) -> Comparison:
    """UsageError or ProfileError for an arm that cannot be resolved or that cannot be compared."""
    compared = tuple(compare) or ((BASELINE,) if profiles else ())
    comparison = _of_profiles(profiles, overrides, compared) if profiles else _of_servers(compared, overrides)
    if not has_floor:
        comparison = replace(comparison, floor=None)
    if ca_file is None:
        return comparison
    if not any(arm.url is not None and is_https(arm.url) for arm in comparison.arms):
        raise UsageError("`--ca-file` is for servers by `https://`, and no arm is one")
    require_file(ca_file, "file of certificates")
    tls_context(str(ca_file))
    return replace(comparison, ca_file=str(ca_file))


def _of_profiles(profiles: Sequence[str], overrides: Sequence[str], compared: Sequence[str]) -> Comparison:
    resolved = resolve_to_start(*profiles, overrides=overrides)
    _require_usable(resolved)
    is_named = any(
        not _is_server(one) and not one.startswith(BASELINE) and _command_in(one) is None for one in compared
    )
    measured = Arm(free_name(resolved.name, RESERVED) if is_named else KVBM, "kvbm", resolved)
    references: list[Arm] = []
    for one in compared:
        taken = (measured.name, FLOOR, *(arm.name for arm in references))
        references.append(_reference(one, resolved, taken))
    _require_different_servers(references)
    return Comparison(measured, tuple(references), Arm(FLOOR, "floor", resolved))


def _of_servers(compared: Sequence[str], overrides: Sequence[str]) -> Comparison:
    """Without a profile: the first server is measured, the others are its references."""
    if not compared or not all(map(_is_server, compared)):
        raise UsageError(
            "without `--profile`, `--compare` takes URLs of running servers, the measured one first",
            hint="`kvbm bench --profile demo`, or `kvbm bench --compare http://127.0.0.1:8000`",
        )
    if overrides:
        raise UsageError("`--set` requires `--profile`")
    arms: list[Arm] = []
    for one in compared:
        arms.append(_server(one, [arm.name for arm in arms]))
    _require_different_servers(arms)
    return Comparison(arms[0], tuple(arms[1:]), None)


def _require_different_servers(arms: Sequence[Arm]) -> None:
    """UsageError if two arms are one server: each would find what the other sent in the cache."""
    names: dict[str, str] = {}
    for arm in arms:
        if arm.url is not None:
            other = names.setdefault(base_url_of(arm.url).lower(), arm.name)
            if other != arm.name:
                raise UsageError(f"`{other}` and `{arm.name}` are the same server, {arm.url}", hint="start two servers")


def _is_server(text: str) -> bool:
    return _URL.fullmatch(text) is not None


def _server(text: str, taken: Sequence[str]) -> Arm:
    found = _URL.fullmatch(text)
    assert found is not None
    url = found["url"]
    try:
        parts = urlsplit(url)
        has_secret = bool(parts.username is not None or parts.query or parts.fragment)
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_secret = is_address = False
    if has_secret:  # not repeated here, and not written to plan.json
        message = "a URL must not contain a password or a query"
        raise UsageError(message, hint="set the variable `KVBM_BENCH_API_KEY` instead")
    if not is_address:
        raise UsageError(f"`{url}` must be a URL such as `http://127.0.0.1:8000`")
    name = found["name"] or next(one for number in itertools.count(1) if (one := f"url-{number}") not in taken)
    if name in (RECORDING, *taken):
        raise UsageError(f"`{name}` is the name of another arm", hint="give the server another name: `NAME=URL`")
    return Arm(name, "url", url=url)


def _reference(text: str, measured: ResolvedProfile, taken: Sequence[str]) -> Arm:
    if _is_server(text):
        return _server(text, taken)
    if text == BASELINE:
        if BASELINE in taken:
            raise UsageError("`--compare baseline` is given twice")
        return Arm(BASELINE, "baseline", measured)
    notes: list[str] = []
    if (command := _command_in(text)) is not None:
        resolved, is_baseline, notes = _started_by(command["command"], command["name"] or "of a command")
    else:
        is_baseline = text.startswith(BASELINE_OF)
        resolved = _profile_to_compare(text.removeprefix(BASELINE_OF))
    _require_usable(resolved)
    _require_comparable(measured, resolved)
    found = {key: (value_of(one), value_of(another)) for key, one, another in differences(measured, resolved)}
    name = free_name((command and command["name"]) or resolved.name, (*RESERVED, *taken))
    _print_notes(name, notes)
    return Arm(name, "baseline" if is_baseline else "profile", resolved, differences=found)


def _command_in(text: str) -> re.Match[str] | None:
    """Return the match of a command line; None for a profile, whose file may have blanks in its name."""
    return None if text.endswith((".yaml", ".yml")) else _COMMAND.fullmatch(text)


def _print_notes(name: str, notes: Sequence[str]) -> None:
    for note in notes:
        print_note(f"note: arm {name}: {note}")


def _started_by(command: str, name: str) -> tuple[ResolvedProfile, bool, list[str]]:
    """Return the profile of a command line, whether it is without kvbm, and what the profile does not carry over. That
    is printed for the arm `name` if the profile is refused, as it may be the cause.

    ProfileError for mistakes of the profile, UsageError for a cache that the arm would not have.
    """
    examined, start = examined_command(command)
    has_kvbm = start.launch.has_kvbm
    if not has_kvbm and (flag := _FLAG_OF_A_CACHE.search(command)) is not None:
        hint = "configure it by `--kv-transfer-config`, or start the engine and compare with `NAME=http://HOST:PORT`"
        raise UsageError(f"an arm of `--compare` cannot have a cache by `{flag[0]}`: kvbm sets this flag", hint=hint)
    notes = [note for note in notes_of(start) if has_kvbm or not _PUT_BACK.match(note)]
    if examined.mistakes:
        _print_notes(name, notes)
        raise together(examined.mistakes)
    assert examined.resolved is not None, "a profile without mistakes is resolved"
    return examined.resolved, not has_kvbm, notes


def _profile_to_compare(compare: str) -> ResolvedProfile:
    """UsageError for a name that is neither `baseline` nor a profile; ProfileError for a wrong profile."""
    try:
        find(compare, directories=[profiles_directory()])
    except ProfileError as error:
        hint = f"did you mean `{BASELINE}`?" if difflib.get_close_matches(compare, [BASELINE]) else error.hint
        if _ADDRESS.fullmatch(compare):
            hint = f"for a server, write `http://{compare}`"
        message = f"--compare takes `{BASELINE}`, a profile or a URL: {error.message}"
        raise UsageError(message, hint=hint) from None
    return resolve_to_start(compare)


def _require_usable(resolved: ResolvedProfile) -> None:
    """UsageError for a profile whose engine `kvbm bench` cannot measure."""
    if resolved.profile.disaggregated.is_enabled:
        message = f"`{resolved.name}` starts several engines, and `kvbm bench` starts one per arm"
        raise UsageError(message, hint="use the profile that it extends")


def _require_comparable(resolved: ResolvedProfile, other: ResolvedProfile) -> None:
    """UsageError unless both engines answer the same requests."""
    for key, one, another in (
        ("engine.kind", resolved.profile.engine.kind, other.profile.engine.kind),
        ("engine.model", resolved.profile.engine.model, other.profile.engine.model),
        ("engine.arguments.served_model_name", resolved.profile.engine.served_name, other.profile.engine.served_name),
    ):
        if one != another:
            message = f"`{resolved.name}` and `{other.name}` cannot be compared: `{key}` is `{one}` and `{another}`"
            raise UsageError(message, hint=f"`--compare` takes a profile with the same `{key}`")


def require_startable(comparison: Comparison) -> None:
    """Run the checks of `kvbm serve` for every profile, with free ports. Raises the first problem."""
    with_kvbm = {id(arm.resolved) for arm in comparison.arms if arm.has_kvbm}
    for profile in profiles_of(comparison):
        has_cache = id(profile) in with_kvbm
        sizing = check(profile, has_cache=has_cache)
        here = _on_free_port(profile)
        require_none(here, problems_here(here, sizing, has_cache=has_cache))


def lacking_here(comparison: Comparison) -> list[str]:
    """Return what a run would lack on this machine, each in one line. ProfileError for any other mistake."""
    with_kvbm = {id(arm.resolved) for arm in comparison.arms if arm.has_kvbm}
    found: list[KvbmError] = []
    for profile in profiles_of(comparison):
        has_cache = id(profile) in with_kvbm
        sizing, mistakes = examine_here(profile, has_cache=has_cache)
        of_machine = [one for one in mistakes if getattr(one, "key", None) in OF_MACHINE]
        if len(of_machine) < len(mistakes):
            raise together([one for one in mistakes if one not in of_machine])
        found += of_machine
        if sizing is not None:
            here = _on_free_port(profile)
            found += [one.error(here) for one in problems_here(here, sizing, has_cache=has_cache)]
    return list(dict.fromkeys(f"not on this machine: {error.message.splitlines()[0]}" for error in found))


def profiles_of(comparison: Comparison) -> list[ResolvedProfile]:
    """Every profile once."""
    found = {id(arm.resolved): arm.resolved for arm in comparison.arms if arm.resolved is not None}
    return list(found.values())


def _on_free_port(resolved: ResolvedProfile) -> ResolvedProfile:
    """Return the profile with a free port for its server, as each arm has it."""
    return replace(resolved, profile=with_values(resolved.profile, "server", port=0))


def with_values(profile: Profile, section: str, **values: object) -> Profile:
    """Return the profile with other values of keys in a section. They are not checked."""
    changed = getattr(profile, section).model_copy(update=values)
    return profile.model_copy(update={section: changed})


def base_url_of(url: str) -> str:
    """Return the URL as given, without the `/v1` that clients of OpenAI append."""
    return url.rstrip("/").removesuffix("/v1")
