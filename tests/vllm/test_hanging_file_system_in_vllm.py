"""A file system that hangs below the disk and the shared tier of a real vLLM: under load, at the end and at the start.

Needs /dev/fuse, libfuse and mfusepy. The cases of the embedded engine are in
tests/embedded/test_hanging_file_system.py. With KVBM_WRITE_RESULTS=1, the measured times are written to bench/results/.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from random import Random

import pytest
from filesystems import Unavailable, mounted
from kept_results import KeptResults
from traffic import Request, asker, assert_equal, repeat, tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, VllmServer

from kvbm.engines.make_model import materialise

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = [Request(tokens(Random(f"hang {number}"), 6 * BLOCK_TOKENS + 9), 8) for number in range(8)]
USUAL_S, HANGS_S = 10.0, 20.0
LONGEST_WAIT_S = 2.5  # beyond the slowest request without the fault, of the same clients in the same run
LONGEST_START_S = LONGEST_STOP_S = 10.0  # beyond a start and a stop without the fault
RESULTS = KeptResults(
    "hanging-file-system-vllm", "pytest -m soak tests/vllm/test_hanging_file_system_in_vllm.py", key="tiers"
)


def timed(run):
    began_s = time.monotonic()
    run()
    return time.monotonic() - began_s


@pytest.mark.parametrize("tiers", ["disk", "shared", "disk and shared"])
def test_no_request_start_or_stop_of_vllm_waits_for_a_file_system_that_hangs(tiers, plain, tmp_path):
    plain.wait_healthy()
    expected = repeat(asker(plain), PROMPTS)
    with ExitStack() as stack:
        try:
            point = stack.enter_context(mounted("fuse-obeys", tmp_path))
        except Unavailable as reason:
            pytest.skip(str(reason))
        order = (tmp_path / "orders").write_text
        stack.callback(order, "")
        (point / "shared").mkdir()
        lower = {
            "disk": {"blocks": 200, "directory": f"{point}/disk", "zerofill": True},
            "shared": {"url": f"file://{point}/shared"},
        }
        contents = {
            "tiers": {"host": {"blocks": 16}, **{name: lower[name] for name in lower if name in tiers}},
            "offload": {"to_disk": "always", "to_shared": "always"},
            "onboard": {"policy": "always"},
        }
        connector = CONNECTOR | {"kv_connector_extra_config": {"kvbm": contents}}

        def start():
            server = VllmServer(materialise("vllm-25m"), blocks=40, connector=connector, max_model_len=2048)
            return stack.enter_context(server)

        def ask(server, request):
            return timed(lambda: assert_equal(repeat(asker(server), [request]), {request: expected[request]}))

        servers = []
        row = {"tiers": tiers, "start_s": timed(lambda: servers.append(start()))}
        server = servers[0]
        for request in PROMPTS:
            ask(server, request)
            time.sleep(1.0)

        def talk(first, until_s):
            waits = []
            while time.monotonic() < until_s:
                waits.append(ask(server, PROMPTS[(first + 2 * len(waits)) % len(PROMPTS)]))
            return waits

        def waits_of_two_clients(for_s):
            with ThreadPoolExecutor(2) as pool:
                until_s = time.monotonic() + for_s
                return list(pool.map(talk, range(2), (until_s, until_s)))

        usual_s = max(map(max, waits_of_two_clients(USUAL_S)))
        order("hang")
        waits = waits_of_two_clients(HANGS_S)
        row |= {"usual_wait_s": usual_s, "longest_wait_s": max(map(max, waits)), "requests": sum(map(len, waits))}
        row["last_wait_s"] = max(each[-1] for each in waits)  # the tiers are off: the engine computes
        row["stop_under_load_s"] = timed(server.stop)
        row["start_hanging_s"] = timed(lambda: servers.append(start()))
        row["first_wait_s"] = ask(servers[1], PROMPTS[0])
        row["stop_hanging_s"] = timed(servers[1].stop)
    RESULTS.add({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()})
    print(row)
    assert row["longest_wait_s"] < usual_s + LONGEST_WAIT_S
    assert row["start_hanging_s"] < row["start_s"] + LONGEST_START_S
    assert max(row["stop_under_load_s"], row["stop_hanging_s"]) < LONGEST_STOP_S
