"""What an arm costs: from the engine's processes, the requests, and a price list."""

import pytest
from experiments import FASTER, Experiment

from kvbm.errors import ProfileError
from kvbm_cli.bench.result.cost import cost_of, read_prices, span_s
from kvbm_cli.bench.result.results import Measurement, RequestRecord

PRICES = {"engine_price": 3.6, "memory_price": 730.0}
SERVER = {"cpu_s": 10.0, "energy_j": None, "disk": {"written_bytes": 4096.0}, "peaks": {"rss_bytes": 2e9}}


def record(launched_ms: float, end_ms: float, *, error: str | None = None) -> RequestRecord:
    place = {"run": "w.1.kvbm", "arm": "kvbm", "cell": "w", "pair": 1, "turn": 1, "phase": "steady"}
    tokens = {"prompt_tokens": 900, "output_tokens": 100}
    times = {"launched_ms": launched_ms, "end_ms": end_ms}
    return RequestRecord(**place, **tokens, **times, index=0, session=0, error=error)


def run(*records: RequestRecord, **server: object) -> Measurement:
    return Measurement("w.1.kvbm", "kvbm", 1, {"server": {**SERVER, **server}}, records)


def test_cost_of_a_known_run():
    one = run(record(0, 400), record(500, 1000), record(600, 90_000, error="timeout"))
    assert span_s(one) == 1.0
    price = 1 / 3600 * (3.6 + 2 * 1.0)  # an hour of the engine, and of 2 GB at 1 per GB and hour
    assert cost_of([one], PRICES) == {
        "tokens_per_core_s": 200.0,
        "output_tokens_per_core_s": 20.0,
        "peak_memory_bytes": 2e9,
        "cpu_s_per_1000_requests": 5000.0,
        "written_bytes_per_1000_requests": 2048e3,
        "energy_j_per_1000_requests": None,
        "price_per_1m_tokens": pytest.approx(price / 2000 * 1e6),
    }


def test_what_is_not_measured_is_unknown():
    found = cost_of([run(record(0, 400)), run(record(0, 400), cpu_s=None, peaks={})], PRICES)
    assert (found["tokens_per_core_s"], found["peak_memory_bytes"], found["price_per_1m_tokens"]) == (None, None, None)
    assert found["written_bytes_per_1000_requests"] == 4096e3
    without_memory = cost_of([run(record(0, 400), peaks={})], {"engine_price": 3.6, "memory_price": 0.0})
    assert without_memory["price_per_1m_tokens"] == pytest.approx(0.4)
    assert cost_of([run(record(0, 400))], None)["price_per_1m_tokens"] is None
    assert cost_of([run(record(0, 400, error="refused"))], PRICES)["price_per_1m_tokens"] is None


def test_the_summary_has_the_price():
    made = Experiment(FASTER)
    for one in made.runs.values():
        one.server.update(SERVER)
    cost = made.summary(surroundings={"prices": PRICES})["cells"][0]["arms"]["kvbm"]["cost"]
    assert cost["price_per_1m_tokens"] > 0
    assert made.summary()["cells"][0]["arms"]["kvbm"]["cost"]["price_per_1m_tokens"] is None


def test_a_price_list_is_read(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text("engine_price: 2.5\n")
    assert read_prices(path) == {"engine_price": 2.5, "memory_price": 0.0}
    path.write_text("memory_price: 3\n")
    with pytest.raises(ProfileError, match="engine_price"):
        read_prices(path)
