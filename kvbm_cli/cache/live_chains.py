"""`kvbm cache pin`, `prefetch`, `release` and `limit`: what an operator does with prompts in a running engine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.errors import EngineError, EnvironmentProblem, ProfileError, UsageError, reason_of
from kvbm.text.outside import shown
from kvbm_cli.cache.control_client import Reply, ask
from kvbm_cli.cache.live_caches import live_run, note_refusals, owner_of
from kvbm_cli.runs.run_client import request_run
from kvbm_cli.runs.run_directory import EngineRun
from kvbm_cli.terminal.console import print_data, print_note
from kvbm_cli.terminal.quantities import counted

TIMEOUT_S = 30.0
MOST_CHARACTERS = 1 << 20
MOST_TOKENS = 40_000  # a message has 256 KiB
_TIME = re.compile(r"([0-9]{1,7})(s|m|h|d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of prompts, in one of three forms, and the cache salt of their requests."""

    text: str | None
    tokens: str | None
    file: Path | None
    salt: str | None


def pin(reference: str, prefix: Prefix, *, time: str) -> int:
    seconds = _seconds(time)
    run, message = _message(reference, "pin", prefix)
    replies = ask(run, {**message, "seconds": str(seconds)})
    return _report(replies, lambda found: f"pinned {found['pinned']} of {_blocks(found)} for {time}: {found['pin']}")


def prefetch(reference: str, prefix: Prefix) -> int:
    replies = ask(*_message(reference, "prefetch", prefix))
    return _report(replies, lambda found: f"{found['in_host']} of {_blocks(found)} in G2")


def release(reference: str, name: str | None) -> int:
    if name is not None and not re.fullmatch("[0-9a-f]{16}", name):
        raise UsageError(f"`{shown(name)}` is no pin", hint="`kvbm cache ls RUN --json` shows the pins")
    replies = ask(live_run(reference), {"verb": "release", **({"pin": name} if name else {})})
    return _report(replies, lambda found: f"released {counted(found['released'], 'block')}")


def limit(reference: str, percent: str, *, salt: str | None, digest: str | None) -> int:
    number = percent.removesuffix("%")
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3})?", number) or float(number) > 100:
        raise UsageError(f"`{shown(percent)}` must be a part of host memory from 0% to 100%")
    owner = owner_of(salt, digest)
    message = {"verb": "limit", "percent": number, **({"tenant": owner} if owner else {})}
    whose = "each tenant" if owner is None else "this tenant"
    return _report(ask(live_run(reference), message), lambda found: f"hints of {whose} may retain {_blocks(found)}")


def _message(reference: str, verb: str, prefix: Prefix) -> tuple[EngineRun, dict[str, str]]:
    given = [one for one in (prefix.text, prefix.tokens, prefix.file) if one is not None]
    if len(given) != 1:
        raise UsageError("one of `--text`, `--tokens` and `--file` is required", hint="for example `--text 'You are'`")
    run = live_run(reference)
    if prefix.tokens is not None:
        tokens = prefix.tokens.replace(",", " ").split()
        if not all(re.fullmatch("[0-9]{1,10}", one) for one in tokens):
            raise UsageError("`--tokens` must be token ids, such as `1,15,42`")
    else:
        text = _read(prefix.file) if prefix.file is not None else prefix.text or ""
        tokens = list(map(str, _tokens_of(run, text)))
    if not 0 < len(tokens) <= MOST_TOKENS:
        raise UsageError(f"the prefix has {len(tokens)} tokens: it must have 1 to {MOST_TOKENS}")
    salt = {} if prefix.salt is None else {"salt": prefix.salt}
    return run, {"verb": verb, "tokens": " ".join(tokens), **salt}


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise ProfileError(f"cannot read `{path}`: {why}") from None
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"`{path}` has more than {MOST_CHARACTERS} characters")
    return text


def _tokens_of(run: EngineRun, text: str) -> list[int]:
    """Return the token ids of a prompt, as the engine itself makes them."""
    answer = request_run(run, "POST", "/tokenize", content={"prompt": text}, timeout_s=TIMEOUT_S)
    if answer.failure:
        raise EnvironmentProblem(f"cannot ask the engine of `{run.name}`: {answer.failure}")
    tokens = answer.fields().get("tokens") if answer.is_ok else None
    if not isinstance(tokens, list) or not all(type(one) is int and 0 <= one < 1 << 31 for one in tokens):
        raise EngineError(f"{run.facts.url}/tokenize returned no token ids", hint="give them with `--tokens`")
    return tokens


def _seconds(text: str) -> int:
    found = _TIME.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else math.inf
    if not 0 < seconds <= 30 * 86_400:
        raise UsageError(f"`--for` must be a time up to 30d, such as `10m`, not `{shown(text)}`")
    return int(seconds)


def _report(replies: Sequence[Reply], line: Callable[[dict[str, Any]], str]) -> int:
    """Print the line of each answer. Returns 1 if an engine refused."""
    for answer in (one.answer for one in replies if one.answer):
        print_data(line(answer))
        if answer.get("is_reading"):
            print_note("the engine still reads blocks from lower tiers; repeat the command to see or pin them")
    return note_refusals(replies)


def _blocks(answer: dict[str, Any]) -> str:
    return counted(answer["blocks"], "block")
