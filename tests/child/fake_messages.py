"""Messages of the fake service, which both processes import."""

from dataclasses import dataclass
from typing import NamedTuple


class OpenFake(NamedTuple):
    cores: frozenset
    problem: str | None = None


class FakeOpened(NamedTuple):
    pass


class Ask(NamedTuple):
    """`what` the process does with it: answer, stop, die, send garbage."""

    ticket: int
    what: str = "answer"


class Answer(NamedTuple):
    ticket: int
    is_good: bool


@dataclass
class FakeCounters:
    answers: int = 0
    times_off: int = 0

    def plus(self, other):
        return FakeCounters(self.answers + other.answers, self.times_off + other.times_off)
