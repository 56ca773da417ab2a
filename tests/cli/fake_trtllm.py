"""Stands for an interpreter with TensorRT-LLM and for its command `trtllm-serve`.

As an interpreter (`-c`), it says what it holds: FAKE_TRTLLM as JSON, else a version that kvbm knows, with this command.
As the command, it parses the options as `trtllm-serve` does, reads the file of options, refuses what TensorRT-LLM
refuses, and then behaves like fake_engine.py. TensorRT-LLM passes to its ranks only variables that start with `TLLM` or
`TRTLLM`: the connector's configuration is resolved with those alone.

With FAKE_TRTLLM_STREAMS it is an engine that streams tokens instead (mock_engine.py). Its G1 holds `max_tokens`, and it
has a cache in host memory if it has the connector. The variable has further options of that engine as JSON. It starts
only if no other one has the device.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import os
import sys
import urllib.request
from pathlib import Path
from unittest import mock

sys.path.insert(0, os.path.dirname(__file__))  # kvbm starts it with PYTHONSAFEPATH

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "bench"))

import fake_engine
import mock_engine
import yaml
from fake_server import Connection, FakeServer, Request

CONNECTOR_KEYS = {"connector_module", "connector_scheduler_class", "connector_worker_class"}
KNOWN = {
    "backend", "cuda_graph_config", "dtype", "kv_cache_config", "kv_connector_config", "max_batch_size",
    "max_beam_width", "max_num_tokens", "max_seq_len", "scheduler_config", "tensor_parallel_size",
    "cache_transceiver_config", "disable_overlap_scheduler",
}  # fmt: skip
PASSED_ON = ("TLLM", "TRTLLM")
STREAMS = "FAKE_TRTLLM_STREAMS"


def wrapper(directory: Path) -> Path:
    """Write an interpreter and a command into a directory; return the interpreter."""
    directory.mkdir()
    for name in ("python", "trtllm-serve"):
        (directory / name).write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {directory / name} "$@"\n')
        (directory / name).chmod(0o755)
    return directory / "python"


def installation(directory: Path, **changed: object) -> str:
    script = str(directory / "trtllm-serve")
    held = {"distribution": "tensorrt_llm", "version": "1.2.0", "script": script, "has_kvbm": True, "rival": None}
    return json.dumps({**held, "has_interface": True, **changed})


def serve(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="trtllm-serve", allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--backend", choices=["pytorch", "tensorrt", "_autodeploy"], required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--extra_llm_api_options", "--config", type=Path, required=True)
    given = parser.parse_args(words)
    file = given.extra_llm_api_options
    if file.stat().st_mode & 0o077:
        sys.exit(f"{file} can be read by others")
    options = yaml.safe_load(file.read_text())
    if unknown := options.keys() - KNOWN:
        sys.exit(f"ValidationError: extra inputs are not permitted: {sorted(unknown)}")
    if "kv_connector_config" in options:
        load_connector(options)
    print(f"options {json.dumps(options)}", flush=True)
    if STREAMS in os.environ:
        stream(options, given.port)
    fake_engine.main()


def stream(options: dict[str, dict[str, int]], port: int) -> None:
    device = Path(sys.argv[1]).with_name("device").open("a")
    try:
        fcntl.flock(device, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    given = {
        "g1_blocks": options["kv_cache_config"]["max_tokens"] // mock_engine.BLOCK,
        **json.loads(os.environ[STREAMS]),
        **({"g2_blocks": 10_000} if "kv_connector_config" in options else {}),
    }
    engine = mock_engine.MockEngine(mock_engine.Options(is_like_trtllm=True, **given), port=port)
    Metrics.lines = engine.model.kvbm_metrics
    engine.serve_forever()


def serve_disaggregated(words: list[str]) -> None:
    """TensorRT-LLM's server in front of context and generation servers, which must be there."""
    parser = argparse.ArgumentParser(prog="trtllm-serve disaggregated", allow_abbrev=False)
    parser.add_argument("-c", "--config_file", type=Path, required=True)
    config = yaml.safe_load(parser.parse_args(words).config_file.read_text())
    if config.keys() != {"hostname", "port", "backend", "context_servers", "generation_servers"}:
        sys.exit(f"unexpected keys: {sorted(config)}")
    for servers in (config["context_servers"], config["generation_servers"]):
        if servers.keys() != {"num_instances", "urls"} or len(servers["urls"]) != servers["num_instances"]:
            sys.exit(f"wrong servers: {servers}")
        for address in servers["urls"]:
            host, port = address.split(":")  # as TensorRT-LLM does
            urllib.request.urlopen(f"http://{host}:{int(port)}/health").close()
    sys.argv += ["--port", str(config["port"])]
    fake_engine.main()


def load_connector(options: dict[str, dict[str, object]]) -> None:
    """What the executor and the connector check when they start."""
    config = options["kv_connector_config"]
    if config.keys() != CONNECTOR_KEYS:
        sys.exit(f"ValidationError: kv_connector_config: {sorted(config)}")
    if options["scheduler_config"]["capacity_scheduler_policy"] != "GUARANTEED_NO_EVICT":
        sys.exit("the capacity policy must be GUARANTEED_NO_EVICT")
    if options["kv_cache_config"]["enable_partial_reuse"] is not False:
        sys.exit("partial reuse")
    connector = importlib.import_module(config["connector_module"])
    for key in ("connector_scheduler_class", "connector_worker_class"):
        assert hasattr(connector, str(config[key]))
    variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    with mock.patch.dict(os.environ, variables, clear=True):
        # As the connector does when TensorRT-LLM, which is not installed here, makes it.
        found = connector._resolved(warns=True)
    print(f"tiers {found.tiers.model_dump_json()}", flush=True)
    if found.metrics.serve:
        Metrics(host=found.metrics.host, port=found.metrics.port).__enter__()


class Metrics(FakeServer):
    """The connector's metrics, on a port of its own."""

    lines = staticmethod(lambda: ['kvbm_host_blocks{state="free"} 3', 'kvbm_host_blocks{state="evictable"} 7'])

    async def answer(self, request: Request, connection: Connection) -> None:
        connection.reply(200, "".join(f"{line}\n" for line in self.lines()))


if __name__ == "__main__":
    program, words = Path(sys.argv[1]), sys.argv[2:]
    if words[0] == "-c":
        print(os.environ.get("FAKE_TRTLLM") or installation(program.parent))
    elif words[:2] == ["-m", "tensorrt_llm.commands.serve"]:
        serve(words[2:])
    elif words[0] == "disaggregated":
        serve_disaggregated(words[1:])
    else:
        serve(words)
