"""A pattern that goes through every configured tier and back, and is compared."""

from __future__ import annotations

from collections.abc import Iterator

from kvbm_cli.doctor.result import Check, skipped
from kvbm_cli.doctor.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    yield skipped("pattern", "not in this version")
