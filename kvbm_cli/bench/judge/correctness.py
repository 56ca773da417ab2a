"""Judges the answers of an arm with kvbm: equal, wrong, not distinguishable from the engine's own noise, or not tested.

An answer is compared with a reference answer to the same request: the recorded one, or the baseline's. Most engines do
not repeat their answers bit by bit: in bfloat16, a cached or differently batched prompt changes a close decision. The
controls show how often: two runs without kvbm, such as the baseline of two pairs, or the floor and the recording.

    wrong                any answer differs, and none of the controls does
                         more answers differ than in the control that differs most (exact test, p < 0.01)
                         log-probabilities of equal tokens differ much more than in the controls
    not tested           nothing was compared; or no block was transferred; or there are neither controls nor
                         log-probabilities, which alone would show a difference that tokens hide
    not distinguishable  answers differ, but not more often than in a control
    equal                no answer differs

Equal tokens are a weak test: a greedy answer often stays the same although a block of its prompt held the KV of another
request. The log-probabilities of its tokens change. After the first different token, two answers continue different
texts, so only tokens before it are compared.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SIGNIFICANT = 0.01
LOGPROB_LIMIT = 1e-3
LOGPROB_FACTOR = 10.0
TESTS = 2  # Bonferroni's correction for the tests of one arm: any difference, and a difference in the first token

Key = tuple[int, ...]  # names a request within a comparison, such as (pair, session, turn)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client received. `token_ids` is `None` if the server sends none; `text` is used instead. `logprobs` has
    one value per token, or none."""

    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """`position` counts from 0: of the first different token, or character if token ids are missing. If one answer is
    the beginning of the other, it is the shorter length."""

    key: Key
    position: int


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """Comparison of the answers of two runs.

    `logprob` is the largest difference of a token's log-probability while all earlier tokens of the answer are equal;
    `None` if a side has no logprobs. `incomparable_count` counts pairs of which one has only text, the other only ids.
    """

    compared_count: int
    differences: tuple[AnswerDifference, ...] = ()
    logprob: float | None = None
    incomparable_count: int = 0

    @property
    def different_count(self) -> int:
        return len(self.differences)

    @property
    def first_token_count(self) -> int:
        """Answers whose first token differs."""
        return sum(difference.position == 0 for difference in self.differences)

    @property
    def share(self) -> float:
        return self.different_count / self.compared_count if self.compared_count else 0.0


def compare_answers(reference: Mapping[Key, Answer], measured: Mapping[Key, Answer]) -> OutputDifference:
    """Compare the answers to all requests that both runs answered."""
    compared, incomparable, differences, logprobs = 0, 0, [], []
    for key in sorted(reference.keys() & measured.keys()):
        first, second = reference[key], measured[key]
        if (sides := _comparable(first, second)) is None:
            incomparable += 1
            continue
        compared += 1
        if (position := _first_difference(*sides)) is not None:
            differences.append(AnswerDifference(key, position))
        if (logprob := _logprob_difference(first, second, position)) is not None:
            logprobs.append(logprob)
    return OutputDifference(compared, tuple(differences), max(logprobs, default=None), incomparable)


def pooled(parts: Iterable[OutputDifference]) -> OutputDifference:
    """Several comparisons as one, such as those of all pairs of runs."""
    parts = list(parts)
    return OutputDifference(
        compared_count=sum(part.compared_count for part in parts),
        differences=tuple(difference for part in parts for difference in part.differences),
        logprob=max((part.logprob for part in parts if part.logprob is not None), default=None),
        incomparable_count=sum(part.incomparable_count for part in parts),
    )


def _comparable(first: Answer, second: Answer) -> tuple[tuple[int, ...] | str, tuple[int, ...] | str] | None:
    if first.token_ids is not None and second.token_ids is not None:
        return first.token_ids, second.token_ids
    if first.text is not None and second.text is not None:
        return first.text, second.text
    return None


def _first_difference(first: tuple[int, ...] | str, second: tuple[int, ...] | str) -> int | None:
    if first == second:
        return None
    shorter = min(len(first), len(second))
    return next((position for position in range(shorter) if first[position] != second[position]), shorter)


def _logprob_difference(first: Answer, second: Answer, position: int | None) -> float | None:
    """Largest difference before `position`, where the answers differ first; `None` if a side lacks a logprob for each
    token. Answers without token ids must have equal texts of as many tokens."""
    if first.token_ids is not None and second.token_ids is not None:
        counts = [(len(first.logprobs), len(first.token_ids)), (len(second.logprobs), len(second.token_ids))]
    else:
        counts = [(len(first.logprobs), len(second.logprobs))]
        if position is not None:
            return None
    if not first.logprobs or any(one != other for one, other in counts):
        return None
    pairs = zip(first.logprobs[:position], second.logprobs[:position], strict=True)
    return max((abs(one - other) for one, other in pairs), default=0.0)


def more_often(measured: int, measured_count: int, control: int, control_count: int) -> float:
    """p-value of Fisher's exact test that the measured share is not above the control's: the probability of at least
    `measured` of all differences among the measured answers, if both differ equally often."""
    total, differences = measured_count + control_count, measured + control
    ways = sum(
        math.comb(measured_count, count) * math.comb(control_count, differences - count)
        for count in range(measured, min(measured_count, differences) + 1)
    )
    return ways / math.comb(total, differences)


@dataclass(frozen=True, slots=True)
class Transfers:
    """What an arm with kvbm brought back: tokens by the engine's count, blocks by kvbm's own.

    Without `are_reported`, neither counts them.
    """

    loaded_tokens: int = 0
    onboarded_blocks: int = 0
    are_reported: bool = True

    @property
    def are_proven(self) -> bool:
        return max(self.loaded_tokens, self.onboarded_blocks) > 0


class OutputVerdict(enum.StrEnum):
    EQUAL = "equal"
    WRONG = "wrong"
    NOT_DISTINGUISHABLE = "not distinguishable"
    NOT_TESTED = "not tested"


@dataclass(frozen=True, slots=True)
class OutputEvidence:
    """What the verdict on the answers is computed from.

    `control` is the control that differs most; `None` without one. `control_logprob` is the largest difference of a
    log-probability in any control. `p_value` comes from the exact test against `control`, corrected for two tests.
    """

    measured: OutputDifference
    transfers: Transfers
    control_name: str | None = None
    control: OutputDifference | None = None
    control_logprob: float | None = None
    p_value: float | None = None

    @property
    def counts(self) -> str:
        text = f"{self.measured.different_count} of {self.measured.compared_count} answers differ"
        if self.control is None:
            return text
        without = f"{self.control.different_count} of {self.control.compared_count} without kvbm ({self.control_name})"
        return f"{text}, and {without}"


@dataclass(frozen=True, slots=True)
class OutputJudgement:
    verdict: OutputVerdict
    reason: str
    evidence: OutputEvidence


def judge_outputs(
    measured: OutputDifference, controls: Mapping[str, OutputDifference], transfers: Transfers
) -> OutputJudgement:
    """Apply the rules in the docstring of this module. Keys of `controls` name the compared runs."""
    usable = {name: control for name, control in sorted(controls.items()) if control.compared_count}
    name = max(usable, key=lambda name: usable[name].share, default=None)
    control = usable[name] if name is not None else None
    evidence = OutputEvidence(
        measured=measured,
        transfers=transfers,
        control_name=name,
        control=control,
        control_logprob=max((one.logprob for one in usable.values() if one.logprob is not None), default=None),
        p_value=_p_value(measured, control) if control and measured.compared_count else None,
    )
    if (reason := _wrong(evidence)) is not None:
        return OutputJudgement(OutputVerdict.WRONG, reason, evidence)
    if (reason := _not_tested(evidence)) is not None:
        return OutputJudgement(OutputVerdict.NOT_TESTED, reason, evidence)
    if measured.different_count:
        reason = f"{evidence.counts}, which is not significantly more"
        return OutputJudgement(OutputVerdict.NOT_DISTINGUISHABLE, reason, evidence)
    return OutputJudgement(OutputVerdict.EQUAL, f"all {measured.compared_count} answers are equal", evidence)


def _p_value(measured: OutputDifference, control: OutputDifference) -> float:
    counts = (measured.compared_count, control.compared_count)
    anywhere = more_often(measured.different_count, counts[0], control.different_count, counts[1])
    at_once = more_often(measured.first_token_count, counts[0], control.first_token_count, counts[1])
    return min(1.0, TESTS * min(anywhere, at_once))


def _wrong(evidence: OutputEvidence) -> str | None:
    measured, control, p_value = evidence.measured, evidence.control, evidence.p_value
    if measured.different_count and control is not None and p_value is not None:
        if not control.different_count:
            return evidence.counts
        if p_value < SIGNIFICANT:
            return f"{evidence.counts}: significantly more, p = {p_value:.2g}"
    without = evidence.control_logprob
    if measured.logprob is None or without is None or measured.logprob <= max(LOGPROB_LIMIT, LOGPROB_FACTOR * without):
        return None
    return (
        f"log-probabilities of equal tokens differ by up to {measured.logprob:.2g}, without kvbm by {without:.2g}; "
        "blocks with wrong content cause this"
    )


def _not_tested(evidence: OutputEvidence) -> str | None:
    measured = evidence.measured
    if not measured.compared_count:
        return "no answer could be compared"
    if not evidence.transfers.are_reported:
        return "the server does not report whether blocks came from G2, G3 or G4"
    if not evidence.transfers.are_proven:
        return "no block came from G2, G3 or G4, so the block manager was not tested"
    unknown = (
        "it is unknown how often this engine repeats its own answers; of an engine that kvbm starts, `--pairs 2` "
        "compares two runs without kvbm"
    )
    if evidence.control is None and (measured.different_count or measured.logprob is None):
        return f"{evidence.counts}; {unknown}"
    if evidence.control_logprob is None and (measured.logprob or 0.0) > LOGPROB_LIMIT:
        return f"log-probabilities differ by up to {measured.logprob:.2g}; no two runs without kvbm have any"
    return None
