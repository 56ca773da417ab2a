"""LaunchPlan: command, environment and URLs of an engine. `launch.py` makes it, `kvbm serve` runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.config.schema import Profile


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """`environment` is added to that of the caller, from which every DYN_KVBM_* variable is removed.

    `libraries` are modules that the engine requires, `install` is the command that installs them. With
    `has_admin_token`, its starter gives the engine a secret in ADMIN_VARIABLE, which is not part of the plan. `files`
    are texts by name, which the engine reads: words of `argv` name them, and `placed` says where they are.
    `metrics_url` has the kvbm_* series if the server of the engine has none.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    base_url: str
    model: str
    libraries: tuple[str, ...] = ()
    install: str = ""
    has_admin_token: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    metrics_url: str = ""

    @property
    def health_url(self) -> str:
        return f"{self.base_url}/health"

    def placed(self, directory: Path) -> LaunchPlan:
        """Return the plan with its files, and the socket of its live control, in `directory`. Its starter writes the
        files."""
        paths = {name: str(directory / name) for name in self.files}
        argv = tuple(paths.get(word, word) for word in self.argv)
        environment = {CONTROL_VARIABLE: str(directory), **self.environment}
        files = {paths[name]: text for name, text in self.files.items()}
        return replace(self, argv=argv, environment=environment, files=files)


ADMIN_VARIABLE = "KVBM_ADMIN_TOKEN"
KEY_VARIABLE = "VLLM_API_KEY"  # of engines with vLLM's API, and of the proxy in front of them
CONTROL_VARIABLE = "KVBM_CONTROL_DIRECTORY"  # where an engine makes the socket of its live control
ADMIN_HEADER = "X-Kvbm-Admin-Token"
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def reachable(host: str) -> str:
    """Return the URL host by which this machine reaches a server that listens on `host`."""
    address = _EVERY_ADDRESS.get(host, host)
    return f"[{address}]" if ":" in address else address


def served_at(host: str, port: int) -> str:
    """Return the base URL by which this machine reaches a server that listens there."""
    return f"http://{reachable(host)}:{port}"


def metrics_url(profile: Profile) -> str:
    """Return the address of the metrics of kvbm itself, empty if they are not served or their port is chosen later."""
    metrics = profile.connector_config().metrics
    if not (metrics.serve and metrics.port and metrics.host):
        return ""
    return f"{served_at(metrics.host, metrics.port)}/metrics"


def as_text(value: object) -> str:
    """Return the text of a flag's value: JSON unless it is text."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flag_words(name: str, value: object) -> Iterator[str]:
    """Yield the words of a flag with a value that is not false. True stands for a flag without a value."""
    flag = flag_of(name)
    if value is True:
        yield flag
    elif isinstance(value, list):
        yield from (flag, *map(as_text, value))
    elif (text := as_text(value)).startswith("-"):
        yield f"{flag}={text}"  # as a separate word it would be parsed as a flag
    else:
        yield from (flag, text)
