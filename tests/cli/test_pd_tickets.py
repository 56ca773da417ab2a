"""Tickets of pinned prompts, without an engine."""

import pytest

from kvbm.engines.vllm import tickets
from kvbm.engines.vllm.tickets import Tickets


@pytest.mark.parametrize(
    ("sent", "asked", "released"),
    [
        ([], ["a"], ["1"]),
        ([], ["a", "a"], ["1", "1"]),
        ([], ["c", None, 5, ["a"], "a" * 1000], []),
        (["1"], ["a", "b"], ["2"]),
    ],
)
def test_blocks_are_released_for_the_ticket_of_their_prompt_while_they_are_pinned(sent, asked, released):
    ended = []
    pinned = Tickets(ended.append)
    for ticket, request_id in {"a": "1", "b": "2"}.items():
        pinned.pinned({"pd_ticket": ticket}, request_id)
    for params in (None, {}, {"pd_ticket": None}):
        pinned.pinned(params, "3")
    pinned.sent(sent)
    for ticket in asked:
        pinned.arrived({"pd_release": ticket})
    assert ended == released


def test_prompts_that_end_after_their_release_are_not_pinned():
    ended = []
    early = Tickets(ended.append)
    last = str(tickets.MOST_UNWANTED)
    for ticket in range(tickets.MOST_UNWANTED + 1):
        early.arrived({"pd_release": str(ticket)})
    for ticket in ("0", "1", "1", last):  # the first is forgotten
        early.pinned({"pd_ticket": ticket}, f"request {ticket}")
    assert ended == ["request 1", f"request {last}"]
