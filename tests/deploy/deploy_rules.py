"""Rules for the objects that deploy vLLM or SGLang with kvbm, for the manifests and for what the chart renders.

`violations` takes the parsed objects and returns one text per broken rule. kvbm's own loader loads the profile, so that
sizes, ports, timeouts and drain times are those of the engine.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from kvbm.config.load import ResolvedProfile
from kvbm.config.schema import Profile
from kvbm.engines.sglang import launch as sglang
from kvbm.engines.table import load
from kvbm.engines.vllm import launch as vllm
from kvbm.sizing import SizeUnknown
from kvbm_cli.serve.served_profile import ServedProfile

KINDS = ("ConfigMap", "Deployment", "PodDisruptionBudget", "Service")
GIB = 1 << 30
LEAST_FOR_PROCESSES = 8 * GIB
INDEX_SHARE = 1.05  # of the volume of G3, for its index
WRITTEN = ("/home/kvbm", "/tmp", "/dev/shm")
SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", re.IGNORECASE)
SECRET_TEXT = re.compile(
    r"\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{20,}|://[^/\s:@]+:[^/\s@]+@|BEGIN [A-Z ]*PRIVATE KEY"
)


@dataclass(frozen=True)
class Deployed:
    """The objects by kind, the only container, and the profile that it serves."""

    objects: dict[str, Any]
    profile: ResolvedProfile

    @property
    def spec(self) -> dict[str, Any]:
        return self.objects["Deployment"]["spec"]

    @property
    def pod(self) -> dict[str, Any]:
        return self.spec["template"]["spec"]

    @property
    def container(self) -> dict[str, Any]:
        return self.pod["containers"][0]

    @property
    def volumes(self) -> dict[str, Any]:
        return {volume["name"]: volume for volume in self.pod["volumes"]}

    @property
    def mounts(self) -> dict[str, str]:
        """Name of the volume by path."""
        return {mount["mountPath"]: mount["name"] for mount in self.container["volumeMounts"]}


def byte_count(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi|Ti)", quantity).groups()
    return int(number) << {"Mi": 20, "Gi": 30, "Ti": 40}[unit]


def profile_of(config_map: dict[str, Any]) -> ResolvedProfile:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "profile.yaml")
        path.write_text(config_map["data"]["profile.yaml"])
        return load(str(path), directories=())


def deployed(objects: list[dict[str, Any]]) -> Deployed:
    by_kind = {one["kind"]: one for one in objects}
    assert tuple(sorted(one["kind"] for one in objects)) == KINDS
    return Deployed(by_kind, profile_of(by_kind["ConfigMap"]))


def violations(objects: list[dict[str, Any]]) -> list[str]:
    all_of_it = deployed(objects)
    rules = (_names, _memory, _disk, _probes, _end, _security, _files, _secrets)
    return [text for rule in rules for text in rule(all_of_it)]


def _names(one: Deployed) -> Iterator[str]:
    labels = one.spec["template"]["metadata"]["labels"].items()
    selectors = {
        "Deployment": one.spec["selector"]["matchLabels"],
        "PodDisruptionBudget": one.objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        "Service": one.objects["Service"]["spec"]["selector"],
    }
    yield from (f"{kind} selects other pods" for kind, selector in selectors.items() if not selector.items() <= labels)
    ports = {port["name"]: port["containerPort"] for port in one.container["ports"]}
    if one.objects["Service"]["spec"]["ports"][0]["targetPort"] not in ports:
        yield "Service names a port that the container does not have"
    server = one.profile.profile.server
    if (server.host, server.port) != ("0.0.0.0", ports["http"]):
        yield f"the profile listens on {server.host}:{server.port}"
    if one.container["args"][:2] != ["--profile", "/etc/kvbm/profile.yaml"]:
        yield "the container serves another profile"
    if one.volumes[one.mounts["/etc/kvbm"]]["configMap"]["name"] != one.objects["ConfigMap"]["metadata"]["name"]:
        yield "the container mounts another ConfigMap"
    if one.pod.get("enableServiceLinks") is not False:
        yield "Kubernetes sets variables such as VLLM_PORT"


def _memory(one: Deployed) -> Iterator[str]:
    limit, request = (one.container["resources"][name]["memory"] for name in ("limits", "requests"))
    if limit != request:
        yield "the scheduler does not count the memory of the limit"
    shm = one.volumes[one.mounts["/dev/shm"]]["emptyDir"]
    if shm.get("medium") != "Memory":
        yield "/dev/shm is not in memory"
    needed = _host_bytes(one.profile.profile) + byte_count(shm["sizeLimit"]) + LEAST_FOR_PROCESSES
    if byte_count(limit) < needed:
        yield f"the memory limit {limit} is less than {needed / GIB:.0f}Gi"


def _host_bytes(profile: Profile) -> int:
    """Memory for blocks: of kvbm, and of SGLang in GB per rank."""
    host, arguments = profile.tiers.host, profile.engine.arguments
    of_sglang = 10**9 * arguments.hicache_size * arguments.tp_size if profile.engine.kind == "sglang" else 0
    return of_sglang + (0 if host is None else host.capacity)


def _disk(one: Deployed) -> Iterator[str]:
    directories = [volume["emptyDir"] for volume in one.volumes.values() if "emptyDir" in volume]
    if any("sizeLimit" not in directory for directory in directories):
        yield "a volume has no size limit"
        return
    on_node = sum(byte_count(found["sizeLimit"]) for found in directories if found.get("medium") != "Memory")
    if on_node > byte_count(one.container["resources"]["requests"]["ephemeral-storage"]):
        yield "the volumes are larger than the requested ephemeral storage"
    disk = one.profile.profile.tiers.disk
    if disk is None:
        return
    name = next((one.mounts[str(p)] for p in PurePosixPath(disk.directory).parents if str(p) in one.mounts), None)
    if name is None:
        yield f"no volume is mounted above {disk.directory}"
    elif _volume_bytes(one.volumes[name]) < disk.capacity * INDEX_SHARE:
        yield f"the volume `{name}` is too small for {disk.capacity}"


def _volume_bytes(volume: dict[str, Any]) -> float:
    if "emptyDir" in volume:
        return byte_count(volume["emptyDir"]["sizeLimit"])
    if "ephemeral" in volume:
        return byte_count(volume["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"])
    return float("inf")  # a claim that exists


def _probes(one: Deployed) -> Iterator[str]:
    profile = one.profile.profile
    plan = {"vllm": vllm.plan, "sglang": sglang.plan}[profile.engine.kind]
    health = urlsplit(plan(profile, connector=True, port=8000).health_url).path
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        if one.container[name]["httpGet"] != {"path": health, "port": "http"}:
            yield f"{name} does not ask {health}"
    startup = one.container["startupProbe"]
    allowed_s = startup["periodSeconds"] * startup["failureThreshold"]
    if allowed_s <= profile.transfer.init_timeout_s:
        yield f"the startup probe gives up after {allowed_s} s"
    if one.spec["progressDeadlineSeconds"] <= allowed_s:
        yield "the roll-out fails before the startup probe does"


def _end(one: Deployed) -> Iterator[str]:
    served = ServedProfile(one.profile, SizeUnknown(""), is_baseline=False)
    program, seconds = one.container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    if one.pod["terminationGracePeriodSeconds"] <= int(seconds) + served.stop_timeout_s:
        yield f"the pod is killed before `kvbm serve` ends ({seconds} + {served.stop_timeout_s:g} s)"
    if one.objects["PodDisruptionBudget"]["spec"].get("maxUnavailable") != 1:
        yield "a drain may stop several replicas"


def _security(one: Deployed) -> Iterator[str]:
    if (
        one.pod["securityContext"].get("runAsNonRoot") is not True
        or one.pod["securityContext"].get("runAsUser", 0) == 0
    ):
        yield "the container may run as root"
    expected = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    if one.container.get("securityContext") != expected:
        yield "the container has more rights than it needs"


def _files(one: Deployed) -> Iterator[str]:
    yield from (f"{path} cannot be written" for path in WRITTEN if path not in one.mounts)
    yield from (f"no volume `{name}`" for name in set(one.mounts.values()) - set(one.volumes))


def _secrets(one: Deployed) -> Iterator[str]:
    for variable in one.container.get("env", []):
        if "value" in variable and SECRET_NAME.search(variable["name"]):
            yield f"{variable['name']} is in clear text"
    if SECRET_TEXT.search(str(one.objects)):
        yield "a credential is in clear text"
    shared = one.profile.profile.tiers.shared
    if shared is not None and shared.url.startswith("s3:") and not one.container.get("envFrom"):
        yield "the store gets no credentials"
