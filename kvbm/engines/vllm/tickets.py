"""Tickets: a router's names for prompts whose blocks a prefill engine pins, so that it can release them.

A router gives `kv_transfer_params.pd_ticket`, a unique text, to a prefill engine. If no decode engine admits the
request, it sends the prefill engine any request with `kv_transfer_params.pd_release`, the same text. This takes effect
when the request arrives, before it is scheduled, because the pinned blocks can fill device memory.

A release can arrive before the prompt has ended: the client has left, and the order to abort is late. Its ticket is
kept for that time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

MOST_UNWANTED = 1024
MAX_CHARACTERS = 128
TICKET = "pd_ticket"
RELEASE = "pd_release"


class Tickets:
    """Tickets of pinned prompts by request. Only the scheduler uses them. `release` gets the name of a request."""

    def __init__(self, release: Callable[[str], None]) -> None:
        self._release = release
        self._pinned: dict[str, str] = {}
        self._unwanted: OrderedDict[str, None] = OrderedDict()

    def arrived(self, kv_transfer_params: object) -> None:
        """Release what this request asks for, if anything."""
        ticket = _text(kv_transfer_params, RELEASE)
        if not ticket:
            return
        pinned = [request_id for request_id, its in self._pinned.items() if its == ticket]
        for request_id in pinned:
            self._release(request_id)
        if not pinned:
            self._unwanted[ticket] = None
            if len(self._unwanted) > MOST_UNWANTED:
                self._unwanted.popitem(last=False)

    def pinned(self, kv_transfer_params: object, request_id: str) -> None:
        """Note that the blocks of a request with these parameters are pinned, or release them."""
        ticket = _text(kv_transfer_params, TICKET)
        if ticket in self._unwanted:
            del self._unwanted[ticket]
            self._release(request_id)
        elif ticket:
            self._pinned[request_id] = ticket

    def sent(self, request_ids: Iterable[str]) -> None:
        """Forget requests whose blocks are no longer pinned."""
        for request_id in request_ids:
            self._pinned.pop(request_id, None)


def _text(kv_transfer_params: object, name: str) -> str:
    """Return a client's parameter, which can be anything, if it is a short text."""
    value = kv_transfer_params.get(name) if isinstance(kv_transfer_params, dict) else None
    return value if isinstance(value, str) and len(value) <= MAX_CHARACTERS else ""
