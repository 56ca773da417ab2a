"""deploy/helm: the values fit their schema, and what Helm renders keeps the rules of the manifests.

Helm is the program in `KVBM_HELM`, or `helm` in PATH. With `KVBM_HELM`, missing programs fail instead of being skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from deploy_rules import byte_count, deployed, violations

CHART = Path(__file__).resolve().parents[2] / "deploy/helm/kvbm"
SETS = sorted((CHART / "ci").glob("*-values.yaml"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def over(values, changes):
    """Return the values with changes, merged as Helm merges values."""
    if not isinstance(values, dict) or not isinstance(changes, dict):
        return changes
    return {**values, **{key: over(values.get(key), change) for key, change in changes.items()}}


def defaults():
    return yaml.safe_load((CHART / "values.yaml").read_text())


def keys_of(schema, prefix=""):
    for name, inner in schema.get("properties", {}).items():
        yield prefix + name
        if inner.get("additionalProperties") is False:
            yield from keys_of(inner, f"{prefix}{name}.")


def tool(name, variable=None):
    in_environment = shutil.which(name, path=str(Path(sys.executable).parent))
    found = os.environ.get(variable or "") or in_environment or shutil.which(name)
    if found is None and "KVBM_HELM" not in os.environ:
        pytest.skip(f"`{name}` is not installed; `nox -s deploy` installs it")
    assert found is not None, f"`{name}` is not installed"
    return found


def helm(*arguments):
    return subprocess.run([tool("helm", "KVBM_HELM"), *arguments], capture_output=True, text=True)


def rendered(*arguments):
    done = helm("template", "test", str(CHART), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(*arguments):
    """The objects of the engines, without those of the monitoring."""
    return [one for one in all_objects(*arguments) if not is_monitoring(one)]


def all_objects(*arguments):
    return [one for one in yaml.safe_load_all(rendered(*arguments)) if one]


def is_monitoring(one):
    return one["kind"] == "ServiceMonitor" or one["metadata"]["name"].endswith("-dashboard")


def test_there_are_four_sets_of_values():
    assert [path.name for path in SETS] == [
        "disk-shared-values.yaml",
        "everything-values.yaml",
        "minimal-values.yaml",
        "sglang-values.yaml",
    ]


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_values_fit_the_schema(path):
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(over(defaults(), yaml.safe_load(path.read_text())), SCHEMA)


def test_each_value_has_a_default():
    for key in keys_of(SCHEMA):
        found = defaults()
        for name in key.split("."):
            assert name in found, key
            found = found[name]


def test_everything_values_set_each_section():
    assert set(yaml.safe_load((CHART / "ci/everything-values.yaml").read_text())) == set(SCHEMA["properties"])


@pytest.mark.parametrize(
    "changes",
    [
        {"replica": 2},
        {"engine": "tensorrt-llm"},
        {"engine": "sglang"},  # without a tier below its host memory
        {"tiers": {"host": {"capacity": "64GiB"}}},
        {"tiers": {"shared": {"enabled": True}}},
        {"tiers": {"shared": {"enabled": True, "url": "s3://key:secret@bucket/prefix"}}},
        {"tiers": {"disk": {"volume": {"kind": "claim"}}}},
        {"tiers": {"disk": {"keys": {"capacity": "1TB"}}}},
        {"profile": {"tiers": {}}},
        {"profile": {"transfer": {"init_timeout_s": 60}}},
    ],
    ids=json.dumps,
)
def test_wrong_values_do_not_fit_the_schema(changes):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(over(defaults(), changes), SCHEMA)


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_helm_lint_accepts_the_chart(path):
    done = helm("lint", "--strict", str(CHART), "--values", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_rendered_objects_keep_the_rules_of_the_manifests(path):
    assert violations(objects("--values", str(path))) == []


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_rendered_objects_are_valid_for_kubernetes(path, tmp_path):
    validate, file = tool("kubernetes-validate"), tmp_path / "objects.yaml"
    file.write_text(rendered("--values", str(path), "--set", "monitoring.enabled=false"))  # its kind is not built in
    done = subprocess.run([validate, "--strict", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed for resource") == 4


def test_manifests_are_valid_for_kubernetes():
    files = map(str, (CHART.parents[1] / "kubernetes").glob("*.yaml"))
    done = subprocess.run([tool("kubernetes-validate"), "--strict", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_everything_values_reach_the_profile():
    one = deployed(objects("--values", str(CHART / "ci/everything-values.yaml")))
    profile = one.profile.profile
    assert profile.engine.arguments.tensor_parallel_size == 4
    assert (profile.tiers.disk.threads, profile.tiers.disk.drain_s) == (16, 60)
    assert (profile.tiers.shared.protection, profile.tiers.shared.expire_days) == ("hmac", 7)
    assert profile.offload.frequency_entries == 4_000_000
    assert byte_count(one.container["resources"]["limits"]["memory"]) == (512 + 64 + 16) << 30
    assert one.mounts["/models"] == "models"


def test_values_of_sglang_reach_its_arguments_and_its_metrics_are_scraped():
    found = all_objects("--values", str(CHART / "ci/sglang-values.yaml"))
    one = deployed([each for each in found if not is_monitoring(each)])
    profile, arguments = one.profile.profile, one.profile.profile.engine.arguments
    assert (profile.engine.kind, arguments.tp_size, arguments.context_length, arguments.page_size) == (
        "sglang",
        2,
        16384,
        64,
    )
    assert arguments.hicache_size == 68, "GB of each of two ranks"
    assert (profile.metrics.serve, profile.tiers.host.capacity) == (True, 4 << 30)
    assert byte_count(one.container["resources"]["limits"]["memory"]) == (128 + 24 + 8 + 4) << 30
    ports = {port["name"]: port["containerPort"] for port in one.container["ports"]}
    assert ports == {"http": 8000, "kvbm-0": profile.metrics.port, "kvbm-1": profile.metrics.port + 1}
    (monitor,) = [each for each in found if each["kind"] == "ServiceMonitor"]
    served = {port["name"] for port in one.objects["Service"]["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} == served == ports.keys()


def test_a_ratio_replaces_the_size_of_the_host_memory_of_sglang():
    found = deployed(objects("--set", "engine=sglang,tiers.disk.enabled=true,engineArguments.hicache_ratio=2"))
    arguments = found.profile.profile.engine.arguments
    assert (arguments.hicache_ratio, arguments.hicache_size, arguments.tp_size) == (2, None, 1)


def test_disk_on_an_existing_claim_needs_no_space_of_the_node():
    disk = "tiers.disk.enabled=true,tiers.disk.volume.kind=claim,tiers.disk.volume.claim=blocks"
    found = objects("--set", disk)
    assert violations(found) == []
    assert deployed(found).volumes["blocks"]["persistentVolumeClaim"] == {"claimName": "blocks"}


@pytest.mark.parametrize(
    ("kind", "key", "expected"),
    [("claim", "", True), ("claim", "false", False), ("claim", "true", True), ("ephemeral", "", False)],
)
def test_unused_caches_on_a_persistent_volume_make_room_unless_the_user_keeps_them(kind, key, expected):
    disk = f"tiers.disk.enabled=true,tiers.disk.volume.kind={kind},tiers.disk.volume.claim=blocks"
    found = deployed(objects("--set", f"{disk},tiers.disk.keys.reclaim={key}" if key else disk))
    assert found.profile.profile.tiers.disk.reclaim is expected


def test_one_value_lets_prometheus_scrape_the_engines_and_grafana_show_them():
    assert not [one for one in all_objects() if is_monitoring(one)]
    found = {one["kind"]: one for one in all_objects("--set", "monitoring.enabled=true") if is_monitoring(one)}
    engines = deployed(objects()).objects
    monitor = found["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= engines["Service"]["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] == engines["Service"]["spec"]["ports"][0]["name"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "kvbm"}], "the alert on `up` names the job"
    board = found["ConfigMap"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["kvbm.json"])["title"] == "kvbm block manager"


def test_other_profile_restarts_the_pods():
    digests = {
        deployed(objects("--set", f"tiers.host.capacityGiB={size}")).spec["template"]["metadata"]["annotations"][
            "kvbm/profile-digest"
        ]
        for size in (64, 65)
    }
    assert len(digests) == 2


def guide_values():
    """The values in docs/guide/kubernetes.md."""
    page = (CHART.parents[2] / "docs/guide/kubernetes.md").read_text()
    return page.split("```yaml\n")[1].split("```")[0]


def test_values_of_the_guide_fit_the_schema():
    jsonschema.validate(over(defaults(), yaml.safe_load(guide_values())), SCHEMA)


def test_values_of_the_guide_make_replicas_that_share_a_store(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(guide_values())
    found = objects("--values", str(file))
    assert violations(found) == []
    one = deployed(found)
    assert one.objects["Deployment"]["spec"]["replicas"] == 2
    assert (one.profile.profile.tiers.shared.url, one.profile.profile.tiers.shared.expire_days) == (
        "s3://kv-cache/team-a",
        7,
    )
