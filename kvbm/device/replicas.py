"""Replicas: ranks with equal KV, which use one segment together.

Replica 0 creates the segment, the others attach to it. The replicas meet three times while they do so, also if one of
them fails, because the others wait for it. Either all of them have the segment afterwards, or all raise the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbm.errors import EnvironmentProblem, KvbmError
from kvbm.host.segment import Segment
from kvbm.types import SegmentInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The place of a rank among the `count` ranks with equal KV. `gather(value)` returns the values of all of them, in
    order; every one of them calls it, and waits for the others."""

    index: int
    count: int
    gather: Callable[[Any], list[Any]]

    def share(
        self,
        node: int | None,
        create: Callable[[tuple[int, ...]], Segment],
        attach: Callable[[SegmentInfo], Segment],
    ) -> Segment:
        """Return the common segment. `create(nodes)` allocates it on the NUMA nodes of all replicas. `node` is the
        node of this one. Raises EnvironmentProblem on all replicas if one of them fails."""
        if self.count == 1:
            return create(() if node is None else (node,))
        nodes = self.gather(node)
        segment, problem = None, None
        if self.index == 0:
            segment, problem = _attempt(lambda: create(() if None in nodes else tuple(sorted(set(nodes)))))
        owner, problem_of_owner = self.gather((segment.info if segment is not None else None, problem))[0]
        if self.index > 0 and owner is not None:
            segment, problem = _attempt(lambda: attach(owner))
        problems = [found for found in (problem_of_owner, *self.gather(problem)) if found is not None]
        if problems or segment is None:
            if segment is not None:
                segment.close()
            message, hint = problems[0]
            raise EnvironmentProblem(message, hint=hint)
        return segment


def _attempt(make: Callable[[], Segment]) -> tuple[Segment | None, tuple[str, str | None] | None]:
    """Return (the segment, None), or (None, message and hint): all replicas raise it together."""
    try:
        return make(), None
    except KvbmError as error:
        return None, (error.message, error.hint)
    except Exception as error:
        log.error("kvbm: the common host memory of several ranks cannot be allocated", exc_info=error)
        return None, (f"{type(error).__name__}: {error}", None)


ALONE = Replicas(index=0, count=1, gather=lambda value: [value])
