"""Control requests to an engine: tokenize, reset the cache, read metrics. None is sent while requests are measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvbm.errors import EngineError

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 30.0
RESET = "/reset_prefix_cache?reset_external=true"
RESET_TIMEOUT_S = 30.0
RESET_INTERVAL_S = 0.02
IN_USE = 409
SOURCES = {"local_cache_hit": "g1", "external_kv_transfer": "g2", "local_compute": "computed"}


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One response of /metrics: `text` unchanged, `samples` by name and sorted labels."""

    text: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    @classmethod
    def parse(cls, text: str) -> EngineMetrics:
        from prometheus_client.parser import text_string_to_metric_families

        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name, tuple(sorted(sample.labels.items()))] = float(sample.value)
        return cls(text, samples)

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of all series of this name (with or without `_total`) with these labels; `None` if there are none."""
        wanted = set(labels.items())
        found = [
            value
            for (sample_name, sample_labels), value in self.samples.items()
            if sample_name in (name, f"{name}_total") and wanted <= set(sample_labels)
        ]
        return sum(found) if found else None

    def labels_of(self, name: str) -> dict[str, str]:
        """Labels of the first series of this name, such as an info metric; empty if there is none."""
        return next((dict(labels) for sample_name, labels in self.samples if sample_name == name), {})

    def names(self, prefix: str) -> list[str]:
        return sorted({name for name, _ in self.samples if name.startswith(prefix)})


@dataclass(frozen=True, slots=True)
class MetricsDelta:
    """The engine's metrics before and after the requests of an arm."""

    before: EngineMetrics
    after: EngineMetrics

    def change(self, name: str, **labels: str) -> float | None:
        after = self.after.total(name, **labels)
        return None if after is None else after - (self.before.total(name, **labels) or 0.0)

    def prompt_tokens_by_source(self) -> dict[str, int] | None:
        """Prompt tokens by `g1`, `g2` and `computed`; `None` if the engine does not report them."""
        changes = {tier: self.change("vllm:prompt_tokens_by_source", source=source) for source, tier in SOURCES.items()}
        if all(change is None for change in changes.values()):
            return None
        return {tier: round(change or 0.0) for tier, change in changes.items()}

    def queue_wait_ms(self) -> float | None:
        """Mean queue time per request; `None` if the engine does not report it."""
        total_s = self.change("vllm:request_queue_time_seconds_sum")
        count = self.change("vllm:request_queue_time_seconds_count")
        return 1e3 * total_s / count if total_s is not None and count else None

    def kvbm_counters(self) -> dict[str, float]:
        """Change of every kvbm_* counter; gauges of states and rates are left out."""
        changes = {
            name: self.change(name)
            for name in self.after.names("kvbm_")
            if not name.endswith(("_rate", "_created", "_blocks")) or "offload" in name or "onboard" in name
        }
        return {name: change for name, change in changes.items() if change is not None}


class Control:
    """One engine's control plane; a context manager. Every failure is an EngineError that names the question."""

    def __init__(self, base_url: str, model: str) -> None:
        import httpx

        self._client = httpx.Client(base_url=base_url, timeout=TIMEOUT_S, trust_env=False)
        self._model = model

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def tokenize(self, text: str) -> list[int]:
        request = {"model": self._model, "prompt": text, "add_special_tokens": False}
        answer = self._call("POST", "/tokenize", json=request).json()
        return [int(token) for token in answer["tokens"]]

    def metrics(self) -> EngineMetrics:
        return EngineMetrics.parse(self._call("GET", "/metrics").text)

    def reset_cache(self) -> None:
        """Forget every block, in G1 and in what the connector keeps, as soon as no copy needs it any more."""
        deadline = time.monotonic() + RESET_TIMEOUT_S
        while not _has_reset(self._call("POST", RESET, accepted=(IN_USE,))):
            if time.monotonic() > deadline:
                raise EngineError(f"the engine's blocks were still in use {RESET_TIMEOUT_S:g} s after the last request")
            time.sleep(RESET_INTERVAL_S)

    def _call(self, method: str, path: str, *, accepted: tuple[int, ...] = (), **arguments: Any) -> httpx.Response:
        import httpx

        try:
            response = self._client.request(method, path, **arguments)
            if response.status_code not in accepted:
                response.raise_for_status()
        except httpx.HTTPStatusError as error:
            problem = f"HTTP {error.response.status_code}: {error.response.text.strip()[:200]}"
            raise EngineError(f"the engine refused {method} {path}: {problem}") from None
        except httpx.HTTPError as error:
            raise EngineError(f"the engine did not answer {method} {path}") from error
        return response


def _has_reset(answer: httpx.Response) -> bool:
    """An engine with blocks in use says 409, or like vLLM 200 and in the body that it has not."""
    if answer.status_code == IN_USE:
        return False
    try:
        body = answer.json()
    except ValueError:
        return True
    return not isinstance(body, dict) or body.get("success") is not False
