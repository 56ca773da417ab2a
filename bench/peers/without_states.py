"""The negative control of bench/peers/states.py: kvbm that loads the attention blocks of a hit, but not its states.

A model whose outputs do not change with this connector cannot show whether a cache restores states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec

from kvbm.engines.vllm.connector import DynamoConnector
from kvbm.plan import Onboard


class WithoutStates(DynamoConnector):
    """Leaves the blocks of the state groups out of every load, and reports the load as complete."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = enumerate(kv_cache_config.kv_cache_groups)
        self._state_groups = [index for index, group in groups if isinstance(group.kv_cache_spec, MambaSpec)]
        self._left_out: set[int] = set()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            tables = blocks.get_block_ids()
            self._left_out.update(block_id for index in self._state_groups for block_id in tables[index])

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders = super().build_connector_meta(scheduler_output)
        onboards = tuple(self._without_states(order) for order in orders.plan.onboards)
        if onboards:
            self._left_out.clear()
        return replace(orders, plan=replace(orders.plan, onboards=onboards))

    def _without_states(self, order: Onboard) -> Onboard:
        rows = zip(order.slots, order.slot_generations, order.block_ids, strict=True)
        kept = [row for row in rows if row[2] not in self._left_out]
        slots, generations, block_ids = zip(*kept, strict=True) if kept else ((), (), ())
        return replace(order, slots=slots, slot_generations=generations, block_ids=block_ids)
