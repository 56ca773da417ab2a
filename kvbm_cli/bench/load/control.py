"""Control requests to an engine: tokenize, reset the cache, read metrics. None is sent during a measurement.

Texts of errors are written to files. The API key of servers by URL never is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial

from kvbm.errors import EngineError, UsageError
from kvbm.text.outside import shown, shown_json
from kvbm_cli.bench.metrics.engine_metrics import NAMES, read_facts
from kvbm_cli.system.http_client import HttpAnswer, get_metrics, request
from kvbm_cli.system.metrics_page import MetricsPage

API_KEY_VARIABLE = "KVBM_BENCH_API_KEY"
LONGEST_READ = 20_000  # a key that a message has further on is not shown
TIMEOUT_S = 30.0
RESET = "/reset_prefix_cache?reset_external=true"
FLUSH, CLEAR_STORAGE = "/flush_cache", "/hicache/storage-backend/clear"  # of SGLang
RESET_TIMEOUT_S = 30.0
RESET_INTERVAL_S = 0.02
FLUSH_INTERVAL_S = 0.1  # SGLang logs a warning each time
IN_USE = 409
REFUSED = 400
CHARACTERS_PER_TOKEN = 64  # far more than words have
MOST_TOKENS = 1e15
CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
LONGEST_MODEL = 4096  # it may be a path


def api_key() -> str | None:
    """Return the key of all servers by URL. UsageError if no HTTP header can have it."""
    key = os.environ.get(API_KEY_VARIABLE)
    if key and not all("!" <= character <= "~" for character in key):
        raise UsageError(f"`{API_KEY_VARIABLE}` must be ASCII without spaces and line ends")
    return key or None


def error_text(text: str) -> str:
    """Return the beginning of the text, without the key: servers may repeat the headers of a request in an error."""
    key, text = os.environ.get(API_KEY_VARIABLE), text[:LONGEST_READ]
    return shown(text.replace(key, "***") if key else text)


class Control:
    """Control plane of one engine. Every failure is an EngineError that names the request."""

    def __init__(self, base_url: str, model: str, *, headers: Mapping[str, str], ca_file: str = "") -> None:
        self._base_url = base_url
        self._model = model
        self._request = partial(request, headers=headers, ca_file=ca_file, timeout_s=TIMEOUT_S)
        self._metrics = partial(get_metrics, headers=headers, ca_file=ca_file, timeout_s=TIMEOUT_S)

    def tokenize(self, text: str) -> list[int]:
        """EngineError if the answer is not that of a tokenizer: callers repeat with longer text to get more tokens."""
        return self._require_enough(self._token_ids(text), text)

    def try_tokenize(self, text: str) -> list[int] | None:
        """`None` if the server has no `/tokenize` that answers like vLLM's. EngineError for too few tokens."""
        try:
            tokens = self._token_ids(text)
        except EngineError:
            return None
        return self._require_enough(tokens, text)

    def _token_ids(self, text: str) -> list[int]:
        content = {"model": self._model, "prompt": text, "add_special_tokens": False}
        tokens = self._call("POST", "/tokenize", content=content).fields().get("tokens")
        if not isinstance(tokens, list) or not all(type(one) is int for one in tokens):
            raise EngineError(f"{self._base_url}/tokenize returned {shown_json(tokens)} instead of a list of token ids")
        return tokens

    def _require_enough(self, tokens: list[int], text: str) -> list[int]:
        if len(tokens) * CHARACTERS_PER_TOKEN < len(text):
            raise EngineError(
                f"{self._base_url}/tokenize returned {len(tokens)} tokens for {len(text)} characters of English words, "
                f"which is less than one per {CHARACTERS_PER_TOKEN} characters: it is not the tokenizer of a model"
            )
        return tokens

    def try_reset(self) -> bool:
        """Whether the server has an endpoint that empties its cache, which is empty afterwards."""
        answer = self._post(RESET)
        if answer.is_ok or answer.status == IN_USE:
            self.reset_cache()
            return True
        return self._flush()

    def g1_tokens(self) -> int | None:
        """Tokens that G1 holds, as the engine reports them; `None` if it is not known."""
        answer = self._metrics(f"{self._base_url}/metrics")
        held = read_facts(MetricsPage.parse(answer.text(), NAMES)).get("g1_tokens") if answer.is_ok else None
        return None if held is None or not 0 <= held <= MOST_TOKENS else held

    def reset_cache(self) -> None:
        """Remove every block from G1 and from the connector; waits until no copy uses one."""
        deadline = time.monotonic() + RESET_TIMEOUT_S
        while not _has_reset(self._call("POST", RESET, accepted=(IN_USE,))):
            if time.monotonic() > deadline:
                raise EngineError(f"the engine's blocks were still in use {RESET_TIMEOUT_S:g} s after the last request")
            time.sleep(RESET_INTERVAL_S)

    def _flush(self) -> bool:
        """Empty the cache of SGLang, which refuses that while a request or a copy runs, and the storage below it."""
        deadline = time.monotonic() + RESET_TIMEOUT_S
        while not (answer := self._post(FLUSH)).is_ok:
            if answer.status != REFUSED or time.monotonic() > deadline:
                return False
            time.sleep(FLUSH_INTERVAL_S)
        return self._post(CLEAR_STORAGE).status != 0  # refused: there is no such storage

    def _post(self, path: str) -> HttpAnswer:
        return self._request("POST", f"{self._base_url}{path}")

    def _call(self, method: str, path: str, *, content: object = None, accepted: tuple[int, ...] = ()) -> HttpAnswer:
        url = f"{self._base_url}{path}"
        answer = self._request(method, url, content=content)
        if answer.failure:
            raise EngineError(f"the engine did not answer {method} {path}: {answer.failure}")
        if not answer.is_ok and answer.status not in accepted:
            raise EngineError(f"the engine refused {method} {path}: HTTP {answer.status}: {error_text(answer.error())}")
        return answer


def served_model(base_url: str, headers: Mapping[str, str], ca_file: str = "") -> str:
    """Return the first model that the server lists. EngineError if it does not answer like an OpenAI server."""
    url = f"{base_url}/v1/models"
    answer = request("GET", url, headers=headers, timeout_s=TIMEOUT_S, ca_file=ca_file)
    if answer.failure:
        hint = "`--ca-file` names the certificate of its authority" if CERTIFICATE in answer.failure else ""
        raise EngineError(f"no server answers at {url}: {answer.failure}", hint=hint)
    if not answer.is_ok:
        raise EngineError(f"the server refused GET {url}: HTTP {answer.status}: {error_text(answer.error())}")
    models = answer.fields().get("data")
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(name, str):
        raise EngineError(f"GET {url} lists no model: it is not an OpenAI server")
    if len(name) > LONGEST_MODEL:
        raise EngineError(f"GET {url} lists a model with a name of {len(name)} characters: `{shown(name)}`")
    return name


def _has_reset(answer: HttpAnswer) -> bool:
    """Return False if blocks are in use: the engine answers 409, or like vLLM 200 with `success` false in the body."""
    return answer.status != IN_USE and answer.fields().get("success") is not False
