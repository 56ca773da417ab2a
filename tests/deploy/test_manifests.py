"""deploy/kubernetes: the manifests parse, fit the profile in their ConfigMap, and each rule can fail."""

from __future__ import annotations

import copy
from functools import reduce
from pathlib import Path

import pytest
import yaml
from deploy_rules import deployed, violations

from kvbm.errors import KvbmError

MANIFESTS = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
POD = ("Deployment", "spec", "template", "spec")
CONTAINER = (*POD, "containers", 0)


def manifests():
    return [one for path in sorted(MANIFESTS.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]


def with_value(path, value):
    objects = copy.deepcopy(manifests())
    kind, *inner = path
    first = next(one for one in objects if one["kind"] == kind)
    reduce(lambda found, key: found[key], inner[:-1], first)[inner[-1]] = value
    return objects


def with_profile(old, new):
    text = next(one for one in manifests() if one["kind"] == "ConfigMap")["data"]["profile.yaml"]
    assert text.count(old) == 1
    return with_value(("ConfigMap", "data", "profile.yaml"), text.replace(old, new))


def test_manifests_keep_all_rules():
    assert violations(manifests()) == []


def test_manifests_have_two_replicas_that_share_an_object_store():
    one = deployed(manifests())
    assert one.spec["replicas"] == 2
    assert one.profile.profile.tiers.shared.url.startswith("s3://")
    assert one.container["envFrom"] == [{"secretRef": {"name": "kvbm-object-store"}}]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("Service", "spec", "selector"), {"app.kubernetes.io/name": "other"}, "selects other pods"),
        (("Service", "spec", "ports"), [{"port": 8000, "targetPort": "web"}], "a port that the container does not"),
        ((*CONTAINER, "args"), ["--profile", "vllm"], "serves another profile"),
        ((*POD, "enableServiceLinks"), True, "VLLM_PORT"),
        ((*CONTAINER, "resources", "requests", "memory"), "64Gi", "does not count the memory"),
        ((*POD, "volumes", 4, "emptyDir"), {"sizeLimit": "8Gi"}, "not in memory"),
        ((*POD, "volumes", 1, "emptyDir"), {"sizeLimit": "200Gi"}, "is too small for"),
        ((*POD, "volumes", 2, "emptyDir"), {}, "no size limit"),
        ((*CONTAINER, "resources", "requests", "ephemeral-storage"), "320Gi", "larger than the requested"),
        ((*CONTAINER, "livenessProbe", "httpGet", "path"), "/ready", "livenessProbe does not ask /health"),
        ((*CONTAINER, "startupProbe", "failureThreshold"), 180, "gives up after 1800 s"),
        (("Deployment", "spec", "progressDeadlineSeconds"), 600, "the roll-out fails"),
        ((*POD, "terminationGracePeriodSeconds"), 60, "killed before `kvbm serve` ends"),
        (("PodDisruptionBudget", "spec", "maxUnavailable"), 2, "stop several replicas"),
        ((*POD, "securityContext", "runAsUser"), 0, "run as root"),
        ((*CONTAINER, "securityContext", "readOnlyRootFilesystem"), False, "more rights"),
        ((*CONTAINER, "env", 0), {"name": "AWS_SECRET_ACCESS_KEY", "value": "x"}, "in clear text"),
        ((*CONTAINER, "env", 0), {"name": "STORE", "value": "http://user:pass@store"}, "a credential is in clear text"),
        ((*CONTAINER, "envFrom"), [], "the store gets no credentials"),
    ],
)
def test_broken_manifest_is_noticed(path, value, expected):
    assert any(expected in text for text in violations(with_value(path, value)))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("capacity: 64GiB ", "capacity: 84GiB ", "the memory limit 96Gi is less than 100Gi"),
        ("directory: /var/cache/kvbm/blocks", "directory: /data/blocks", "no volume is mounted above /data/blocks"),
        ("host: 0.0.0.0", "host: 127.0.0.1", "listens on 127.0.0.1:8000"),
        ("init_timeout_s: 1800", "init_timeout_s: 3600", "the startup probe gives up"),
        ("url: s3://kv-cache/team-a", "url: s3://kv-cache/team-a\n    drain_s: 30", "killed before `kvbm serve` ends"),
    ],
)
def test_profile_that_does_not_fit_the_pod_is_noticed(old, new, expected):
    assert any(expected in text for text in violations(with_profile(old, new)))


def test_profile_with_a_mistake_is_refused():
    with pytest.raises(KvbmError, match="capacty"):
        violations(with_profile("capacity: 64GiB", "capacty: 64GiB"))
