"""Where the connector refuses to run: roles, and places in a MultiConnector. No engine is started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm_server import CONNECTOR, FAULTY_CONNECTOR

from kvbm.engines.vllm import placement
from kvbm.errors import ProfileError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch
OURS = CONNECTOR
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
MOONCAKE = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def multi(*children, **changes):
    fields = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return fields | {"kv_connector_extra_config": {"connectors": list(children)}} | changes


def pd(**changes):
    return multi(OURS, NIXL) | CONNECTOR | {"kv_connector": "PdConnector"} | changes


def check(monkeypatch, config):
    engine = SimpleNamespace(kv_transfer_config=KVTransferConfig(**config))
    monkeypatch.setattr(placement, "get_current_vllm_config_or_none", lambda: engine)
    placement.require_parent()


@pytest.mark.parametrize(
    "config",
    [
        OURS,
        pd(),
        pd(kv_role="kv_consumer"),
        multi(OURS),
        multi(EXAMPLE, OURS),
        multi(OURS, EXAMPLE),
        multi(multi(OURS), EXAMPLE),
        multi(pd(), EXAMPLE),
    ],
)
def test_it_runs_alone_in_pd_and_with_connectors_that_have_no_handshake(monkeypatch, config):
    check(monkeypatch, config)


DERIVED = FAULTY_CONNECTOR  # from ours
PRODUCER = NIXL | {"kv_role": "kv_producer"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, ""),
        (OURS, ""),
        (DERIVED, ""),
        (pd(), "NixlConnector"),
        (pd(kv_connector_extra_config={"connectors": [OURS, PRODUCER]}), ""),
        (multi(OURS), ""),
        (multi(OURS, PRODUCER), ""),
        (multi(OURS, NIXL), "NixlConnector"),
        (multi(EXAMPLE, OURS), "ExampleConnector"),
        (multi(OURS, EXAMPLE | {"kv_role": "kv_producer"}), "ExampleConnector"),
        (multi(multi(OURS), multi(EXAMPLE)), "ExampleConnector"),
    ],
)
def test_a_sibling_that_may_load_blocks_is_named(monkeypatch, config, expected):
    """ExampleConnector loads whatever its role is."""
    engine = config and SimpleNamespace(kv_transfer_config=KVTransferConfig(**config))
    monkeypatch.setattr(placement, "get_current_vllm_config_or_none", lambda: engine)
    assert placement.loading_sibling() == expected


class ReportsFailures(ExampleConnector):
    """Loads within a step, and reports what failed after it."""

    def get_block_ids_with_load_errors(self):
        return set()


REPORTS_FAILURES = {
    "kv_connector": "ReportsFailures",
    "kv_connector_module_path": "test_placement",
    "kv_role": "kv_both",
}


FAILS = {"kv_load_failure_policy": "fail"}  # it ends requests after a failed load
RECOMPUTE = '"kv_load_failure_policy": "recompute"'


@pytest.mark.parametrize(
    ("config", "words", "remedy"),
    [
        # kvbm would store what the step has computed from blocks that were not loaded.
        (multi(OURS, REPORTS_FAILURES), "ReportsFailures cannot run with kvbm", ""),
        (multi(REPORTS_FAILURES, OURS), "ReportsFailures cannot run with kvbm", ""),
        (multi(multi(OURS), multi(EXAMPLE, REPORTS_FAILURES)), "ReportsFailures cannot run with kvbm", ""),
        # Two children with handshakes. Ours twice would use one host memory for two leaders.
        (multi(OURS, NIXL), "DynamoConnector, NixlConnector", "PdConnector"),
        (multi(NIXL, OURS), "NixlConnector, DynamoConnector", "PdConnector"),
        (multi(OURS, OURS), "DynamoConnector, DynamoConnector", "PdConnector"),
        (multi(EXAMPLE, multi(OURS), NIXL), "DynamoConnector, NixlConnector", "PdConnector"),
        (multi(pd(), NIXL), "PdConnector, NixlConnector", "PdConnector"),
        (multi(OURS, **FAILS), "kv_load_failure_policy `fail`", RECOMPUTE),
        (multi(multi(OURS)) | FAILS, "kv_load_failure_policy `fail`", RECOMPUTE),
        (multi(OURS, kv_role="kv_producer"), "kv_role `kv_producer`", ""),
        (pd(kv_role="kv_producer"), "kv_role `kv_producer`", ""),
    ],
)
def test_a_parent_or_sibling_with_which_answers_could_be_wrong_is_refused(monkeypatch, config, words, remedy):
    with pytest.raises(ProfileError, match=words) as caught:
        check(monkeypatch, config)
    assert remedy in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("child", [MOONCAKE, FAULTY_CONNECTOR])
def test_a_connector_that_reports_failures_before_the_step_is_accepted(child):
    assert not placement._may_fail_in_a_step(KVTransferConfig(**child))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_our_own_role_must_be_both(role):
    placement.require_role(KVTransferConfig(**OURS))
    with pytest.raises(ProfileError, match=role):
        placement.require_role(KVTransferConfig(**OURS | {"kv_role": role}))
