"""KvbmTier against the interface that vLLM's tiering calls, by names and arguments, without vLLM.

The interface is that of vLLM 0.32 and 0.33, which do not differ in it. tests/vllm/test_secondary_tier.py compares it
with the vLLM that is installed.
"""

from __future__ import annotations

import inspect

import pytest

from kvbm.engines.vllm.secondary_tier import KvbmTier

ABSTRACT = {
    "lookup": ("key", "req_context"),
    "submit_store": ("job_metadata",),
    "submit_load": ("job_metadata",),
    "get_finished_jobs": (),
    "on_new_request": ("req_context",),
    "drain_jobs": (),
}
OPTIONAL = {
    "has_pending_work": (),
    "take_events": (),
    "touch": ("keys", "req_context"),
    "on_request_finished": ("req_context",),
    "serve_external_requests": ("parent",),
    "on_schedule_end": ("context",),
    "shutdown": (),
    "get_stats": (),
}
CONSTRUCTOR = ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector")
RESULT = {"job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"}
JOB = {"job_id", "keys", "chunk_ids", "is_promotion", "req_context"}
OWN = {"note_request", "weights_may_change", "adapter_is_loaded"}  # called by kvbm's own wrappers


def test_each_abstract_method_is_there():
    assert set(ABSTRACT) <= set(vars(KvbmTier))


@pytest.mark.parametrize("name", sorted(set(ABSTRACT | OPTIONAL) & set(vars(KvbmTier))))
def test_a_method_takes_what_vllm_passes(name):
    arguments = (ABSTRACT | OPTIONAL)[name]
    signature = inspect.signature(getattr(KvbmTier, name))
    signature.bind("self", *arguments)
    signature.bind("self", **dict.fromkeys(arguments))


def test_the_constructor_takes_what_vllm_passes_and_the_keys_of_the_configuration():
    inspect.signature(KvbmTier).bind(**dict.fromkeys(CONSTRUCTOR), kvbm={})


def test_no_public_method_is_misspelt():
    public = {name for name, one in vars(KvbmTier).items() if callable(one) and not name.startswith("_")}
    assert public - set(ABSTRACT | OPTIONAL) == OWN
