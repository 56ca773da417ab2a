"""POLICIES: every policy by the name that a profile has for it, in `eviction` of a tier (`config/schema.py`).

`policy.py` says how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.core.policies.adaptive import Adaptive
from kvbm.core.policies.lru import Lru
from kvbm.core.policies.policy import Policy

POLICIES: Mapping[str, type[Policy]] = {"lru": Lru, "adaptive": Adaptive}
