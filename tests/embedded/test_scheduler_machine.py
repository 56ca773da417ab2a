"""The scheduler as a state machine: requests with shared prefixes come, are aborted, loaded, failed and reset in any
order, in a G1 that is far too small, and every answer is still right and every block comes back.

The simulated runner proves the KV of every position that is read; the block pool is checked after every step.
"""

import host_connector
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_engine import SimulatedEngine, expected_output

BLOCK = 4
PREFIXES = [[], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [40] * 20]


class SchedulerMachine(RuleBasedStateMachine):
    """One engine; `results` are the requests that have not ended, by id."""

    @initialize(
        blocks=st.integers(10, 24),
        budget=st.integers(3, 40),
        requests=st.integers(1, 6),
        has_connector=st.booleans(),
        prefix_caching=st.booleans(),
    )
    def create(self, blocks, budget, requests, has_connector, prefix_caching):
        sides = None
        if has_connector:
            sides = host_connector.create(block_size=BLOCK, latency_steps=None)
        self.engine = SimulatedEngine(
            blocks=blocks,
            block_size=BLOCK,
            max_batched_tokens=budget,
            max_requests=requests,
            prefix_caching=prefix_caching,
            connector=sides,
        )
        self.connector = sides
        self.results = {}
        self.held = []
        self.count = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(1, 3), max_size=9),
        max_tokens=st.integers(1, 9),
        ignore_eos=st.booleans(),
        salt=st.sampled_from([None, None, None, "tenant"]),
    )
    def add(self, prefix, tail, max_tokens, ignore_eos, salt):
        self.count += 1
        name = f"r{self.count}"
        prompt = [*prefix, *tail] or [5]
        self.results[name] = self.engine.add(
            prompt, request_id=name, max_tokens=max_tokens, ignore_eos=ignore_eos, cache_salt=salt
        )

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.results)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.results)))
        assert self.engine.core.abort(name)
        assert self.results[name].is_finished

    @rule()
    def reset(self):
        self.engine.scheduler.reset_prefix_cache()

    @precondition(lambda self: self.connector and self.connector[1].loading_ids)
    @rule(data=st.data())
    def end_a_load(self, data):
        self.connector[1].finish_loads(data.draw(st.sampled_from(self.connector[1].loading_ids)))
        self.engine.step()

    @precondition(lambda self: self.connector)
    @rule(count=st.integers(1, 3))
    def fail_coming_loads(self, count):
        self.connector[1].fail_next = count

    @precondition(lambda self: self.connector)
    @rule(data=st.data())
    def put_off(self, data):
        names = sorted(self.results) or ["r1"]
        self.connector[0].not_yet = set(data.draw(st.lists(st.sampled_from(names), max_size=2)))

    @precondition(lambda self: not self.held)
    @rule(count=st.integers(1, 2))
    def hold_blocks(self, count):
        """As a connector does while it copies from G1."""
        tables = [result.request.block_ids for result in self.results.values() if result.request.block_ids]
        if tables:
            self.held = tables[0][:count]
            self.engine.blocks.hold(self.held)

    @precondition(lambda self: self.held)
    @rule()
    def release_blocks(self):
        self.engine.blocks.release(self.held)
        self.held = []

    @invariant()
    def answers_are_right_so_far(self):
        for name, result in list(getattr(self, "results", {}).items()):
            assert result.token_ids == expected_output(result.request.prompt_token_ids, len(result.token_ids)), name
            if result.is_finished:
                del self.results[name]

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.blocks.release(self.held)
        if self.connector is not None:
            self.connector[0].not_yet.clear()
            self.connector[1].latency_steps = 1
            self.connector[1].finish_loads()
        self.engine.run()
        for result in self.results.values():
            assert result.is_finished
            assert result.last.finish_reason in ("stop", "length", "abort")
        if self.connector is not None:
            finished = self.connector[0].finished
            assert finished == dict.fromkeys((f"r{n + 1}" for n in range(self.count)), 1)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.soak
class TestSchedulerForLong(SchedulerMachine.TestCase):
    settings = settings(
        max_examples=5000, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
    )
