"""ControlDesk: takes operators' messages from any thread, checks them, and passes them to the leader's thread.

A message is one JSON object, and so is the answer:

    {"verb": "ls"}                                        {"answer": {...}}
    {"verb": "clear", "tier": "G2", "tenant": "<hex>"}    {"refused": "why"}
    {"verb": "pin", "tokens": "17 4 99", "salt": "...", "seconds": "600"}
    {"verb": "prefetch", "tokens": "17 4 99", "salt": "..."}
    {"verb": "release", "pin": "<hex>"}
    {"verb": "limit", "percent": "10", "tenant": "<hex>"}

Only `tokens` and `percent` must be there. Every message is answered within LIMIT_S, or refused with the reason, and is
logged with its sender. What a message says is checked here; what it does is a verb of `kvbm/leader/control.py`.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvbm.leader.control import CacheControl, Refused
from kvbm.text.outside import shown, shown_json
from kvbm.text.reading import parse_json
from kvbm.types import Tier

LIMIT_S = 1.0
MAX_BYTES = 1 << 18  # of a message: about 40,000 token ids
IDLE = (
    "the engine takes no step, so that nothing was done: it computes a long step, hangs, or cannot be woken while idle"
)
_UNLOGGED = {"salt", "tokens"}
MOST_SALT, MOST_SECONDS = 1024, 30 * 86_400
_TENANT, _PIN = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{16}")
_TOKENS, _NUMBER = re.compile(r"[0-9]{1,10}( [0-9]{1,10})*"), re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

log = logging.getLogger(__name__)


class ControlDesk:
    """`wake()` makes an engine that has nothing to do take a step; it may be called by any thread. None if
    nothing can."""

    def __init__(self, control: CacheControl, wake: Callable[[], None] | None, *, engine: int) -> None:
        self._control = control
        self._wake = wake
        self._engine = engine

    def reply(self, message: bytes, sender: str) -> bytes:
        """Return the answer to a message. Never raises."""
        began_s = time.monotonic()
        text = f"{len(message)} bytes"  # if they are wrong and may have a salt
        try:
            if b"salt" not in message:
                text = shown(message.decode("utf-8", "replace"))
            verb, arguments = parsed(message)
            hidden = dict.fromkeys(_UNLOGGED & arguments.keys(), "...")
            text = shown(json.dumps({"verb": verb, **arguments, **hidden}))
            reply = {"engine": self._engine, "answer": self._answer(verb, arguments)}
            result = "done"
        except Refused as refusal:
            reply = {"engine": self._engine, "refused": str(refusal)}
            result = f"refused, {refusal}"
        log.info("kvbm: control: %s sent %s: %s, %.0f ms", sender, text, result, 1000 * (time.monotonic() - began_s))
        return json.dumps(reply).encode()

    def _answer(self, verb: str, arguments: dict[str, str]) -> dict[str, Any]:
        future = self._control.submit(verb, arguments)
        if self._wake is not None:
            self._wake()
        return awaited(future)


def awaited(future: Future[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer; Refused if there is none within LIMIT_S."""
    try:
        return future.result(timeout=LIMIT_S)
    except TimeoutError:
        if future.cancel():
            raise Refused(IDLE) from None
    raise Refused(f"it has begun, and has not ended within {LIMIT_S:g} s; it continues")


def parsed(message: bytes) -> tuple[str, dict[str, str]]:
    """Return the verb and the arguments of a message. Raises Refused."""
    try:
        document = parse_json(message)
    except ValueError:
        raise Refused("the message is not JSON") from None
    if not isinstance(document, dict):
        raise Refused("the message is not a JSON object")
    verb = document.pop("verb", None)
    checks = ARGUMENTS.get(verb) if isinstance(verb, str) else None
    if checks is None:
        raise Refused(f"unknown verb {shown_json(verb)}; known are {', '.join(sorted(ARGUMENTS))}")
    for name, value in document.items():
        if name not in checks:
            raise Refused(f"`{verb}` has no argument `{shown(name)}`")
        if not isinstance(value, str) or not checks[name](value):
            raise Refused(f"`{name}` cannot be {shown_json(value)}")
    if missing := sorted(REQUIRED.get(verb, set()) - set(document)):
        raise Refused(f"`{verb}` requires `{missing[0]}`")
    return verb, document


def _is_number(text: str, *, most: float) -> bool:
    return _NUMBER.fullmatch(text) is not None and 0 <= float(text) <= most


_CHAIN: dict[str, Callable[[str], bool]] = {
    "tokens": lambda text: _TOKENS.fullmatch(text) is not None and max(map(int, text.split())) < 1 << 31,
    "salt": lambda text: len(text) <= MOST_SALT,
}
REQUIRED = {"pin": {"tokens"}, "prefetch": {"tokens"}, "limit": {"percent"}}
ARGUMENTS: dict[str, dict[str, Callable[[str], bool]]] = {
    "ls": {},
    "clear": {
        "tier": lambda text: text in (Tier.HOST, Tier.DISK),
        "tenant": lambda text: _TENANT.fullmatch(text) is not None,
    },
    "pin": {**_CHAIN, "seconds": lambda text: _is_number(text, most=MOST_SECONDS)},
    "prefetch": _CHAIN,
    "release": {"pin": lambda text: _PIN.fullmatch(text) is not None},
    "limit": {
        "percent": lambda text: _is_number(text, most=100),
        "tenant": lambda text: _TENANT.fullmatch(text) is not None,
    },
}
