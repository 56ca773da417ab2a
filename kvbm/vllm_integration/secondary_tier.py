"""A tier in vLLM's `secondary_tiers` names this module, which is `kvbm.engines.vllm.secondary_tier`."""

import sys

from kvbm.engines.vllm import secondary_tier

sys.modules[__name__] = secondary_tier
