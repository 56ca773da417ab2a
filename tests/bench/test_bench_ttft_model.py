import random

import pytest

from kvbm_cli.bench.judge.estimates import NoModel, PromptTime, TtftModel, fit_ttft


def requests(
    count: int = 200, *, noise_ms: float = 0.0, g3: bool = True, load_ms: float = 12.0, seed: int = 1
) -> list[PromptTime]:
    """A third of the requests each: computed, with tokens from G2, with tokens from G3 (or G2)."""
    generator = random.Random(seed)
    found = []
    for index in range(count):
        computed = generator.randint(50, 4000)
        loaded = generator.randint(500, 8000) if index % 3 else 0
        g3_tokens = loaded if g3 and index % 3 == 2 else 0
        g2_tokens = loaded - g3_tokens
        time_ms = 8 + (load_ms if loaded else 0) + 0.1 * computed + 0.01 * g2_tokens + 0.03 * g3_tokens
        found.append(PromptTime(time_ms + generator.gauss(0, noise_ms), computed, g2_tokens, g3_tokens))
    return found


def model_of(samples: list[PromptTime]) -> TtftModel:
    model = fit_ttft(samples)
    assert isinstance(model, TtftModel), model
    return model


def test_costs_are_found_again():
    model = model_of(requests())
    assert (model.base_ms, model.load_ms) == pytest.approx((8, 12))
    assert model.computed_ms_per_token == pytest.approx(0.1)
    assert (model.g2_ms_per_token, model.g3_ms_per_token) == pytest.approx((0.01, 0.03))
    assert model.explained == pytest.approx(1)
    assert model.g2_break_even_tokens == pytest.approx(12 / 0.09)
    assert model.g3_break_even_tokens == pytest.approx(12 / 0.07)


def test_costs_are_found_through_noise():
    model = model_of(requests(600, noise_ms=20))
    assert model.computed_ms_per_token == pytest.approx(0.1, rel=0.1)
    assert model.g2_ms_per_token == pytest.approx(0.01, rel=0.4)
    assert 0.9 < model.explained < 1


def test_no_cost_is_negative():
    """Loads that take no time, with noise: plain least squares gives a negative cost for some seeds."""
    models = [model_of(requests(100, noise_ms=30, load_ms=0.0, seed=seed)) for seed in range(20)]
    assert all(min(m.base_ms, m.load_ms or 0, m.g2_ms_per_token or 0, m.g3_ms_per_token or 0) >= 0 for m in models)
    assert any(model.load_ms == 0 for model in models)


def test_order_does_not_matter():
    samples = requests(noise_ms=5)
    assert model_of(samples).g2_ms_per_token == pytest.approx(model_of(samples[::-1]).g2_ms_per_token)


def test_a_tier_without_tokens_has_no_cost():
    model = model_of(requests(g3=False))
    assert model.g3_ms_per_token is None
    assert model.g3_break_even_tokens is None
    assert model.g2_ms_per_token == pytest.approx(0.01)


def test_loading_that_is_slower_than_computing_never_breaks_even():
    slow = [PromptTime(r.ttft_ms + 0.2 * r.g2_tokens, r.computed_tokens, r.g2_tokens, 0) for r in requests(g3=False)]
    assert model_of(slow).g2_break_even_tokens is None


def test_without_requests_that_load_nothing_the_cost_per_load_is_unknown():
    model = model_of([request for request in requests(300, g3=False) if request.g2_tokens])
    assert model.load_ms is None
    assert model.base_ms == pytest.approx(20)
    assert model.g2_break_even_tokens is None


def reason_of(samples: list[PromptTime]) -> str:
    model = fit_ttft(samples)
    assert isinstance(model, NoModel)
    return model.reason


def test_reasons_of_no_model():
    assert reason_of([]) == "0 requests are too few for 1 coefficients, 10 are needed"
    assert "20 requests are too few for 5 coefficients, 50 are needed" in reason_of(requests(20))
    assert reason_of([PromptTime(5, 100, 0, 0)] * 50) == "all requests computed the same number of tokens"
    fixed_length = [PromptTime(10 + index, 4000 - 16 * index, 16 * index, 0) for index in range(1, 100)]
    assert reason_of(fixed_length) == "computed and g2 change together, so their costs cannot be separated"
    generator = random.Random(3)
    unrelated = [PromptTime(generator.gauss(100, 10), generator.randint(1, 4000), 0, 0) for _ in range(100)]
    assert "explain only" in reason_of(unrelated)
