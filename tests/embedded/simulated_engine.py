"""The engine's own scheduler, block pool and core around a model that is a hash: exact, instant, and it proves its KV.

The KV of a position is the digest of all tokens up to it, and the next token is derived from the digest of all
tokens. The runner checks the KV of every position before the ones that it computes, so a block that was shared,
reused, loaded or kept wrongly is caught in the step that reads it.
"""

from __future__ import annotations

import hashlib
import itertools

import torch
from engine_rig import Result
from pool_check import check_pool

from kvbm import hashing
from kvbm.engines.embedded.engine.block_pool import BlockPool
from kvbm.engines.embedded.engine.engine_core import EngineCore
from kvbm.engines.embedded.engine.request import Request, SamplingParams
from kvbm.engines.embedded.engine.scheduler import Scheduler, SchedulerLimits
from kvbm.host.layout import BlockLayout

VOCABULARY = 50
STOP = 0  # the token that ends a request which does not ignore it
GARBAGE = b"garbage"
DIGEST_BYTES = 8

_ids = itertools.count()


def digests(token_ids: list[int]) -> list[bytes]:
    """One per position: names this token and all before it."""
    result, digest = [], b""
    for token_id in token_ids:
        digest = hashlib.blake2b(digest + bytes([token_id]), digest_size=DIGEST_BYTES).digest()
        result.append(digest)
    return result


def next_token(token_ids: list[int]) -> int:
    return digests(token_ids)[-1][0] % VOCABULARY


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class SimulatedMemory:
    """G1 as lists: `content[block][offset]`."""

    def __init__(self, block_count: int, block_size: int) -> None:
        self.block_size = block_size
        self.content = [[GARBAGE] * block_size for _ in range(block_count)]

    def read(self, block_id: int) -> object:
        return list(self.content[block_id])

    def write(self, block_id: int, content) -> None:
        self.content[block_id] = list(content)

    def spoil(self, block_id: int) -> None:
        self.content[block_id] = [GARBAGE] * self.block_size


class SharedMemoryOfBytes:
    """SimulatedMemory as bytes that a real worker of kvbm copies: `register_kv_pool` accepts it."""

    fd = None

    def __init__(self, block_count: int, block_size: int) -> None:
        self.block_size = block_size
        self.storages = [torch.zeros(block_count * block_size * DIGEST_BYTES, dtype=torch.uint8)]
        cells = self.storages[0].numpy().view(f"V{DIGEST_BYTES}")
        self.content = [_Cells(row) for row in cells.reshape(block_count, block_size)]

    def layout(self) -> BlockLayout:
        size = self.block_size * DIGEST_BYTES
        return BlockLayout.block_contiguous(block_count=len(self.content), block_bytes=size)

    def spoil(self) -> None:
        self.storages[0].fill_(0x4E)


class _Cells:
    """The cells of one block, as bytes objects."""

    def __init__(self, row) -> None:
        self._row = row

    def __getitem__(self, offset: int) -> bytes:
        return self._row[offset].tobytes()

    def __setitem__(self, offset: int, digest: bytes) -> None:
        self._row[offset] = digest


class SimulatedRunner:
    """Computes like the torch runner: what the scheduler says, into the blocks that the tables name."""

    def __init__(self, memory: SimulatedMemory) -> None:
        self._memory = memory

    def run(self, step):
        tokens = []
        for request, count in step.scheduled.items():
            assert count > 0
            start, end = request.num_computed_tokens, request.num_computed_tokens + count
            truth = digests(request.all_token_ids[:end])
            assert len(set(request.block_ids)) == len(request.block_ids), request.block_ids
            read = [self._cell(request, position) for position in range(start)]
            assert read == truth[:start], f"{request.request_id} reads wrong KV before position {start}"
            for position in range(start, end):
                block_id = request.block_ids[position // self._memory.block_size]
                self._memory.content[block_id][position % self._memory.block_size] = truth[position]
            if end == request.num_tokens:
                tokens.append((next_token(request.all_token_ids), None))
        return tokens

    def _cell(self, request, position: int) -> bytes:
        size = self._memory.block_size
        return self._memory.content[request.block_ids[position // size]][position % size]


class SimulatedEngine:
    """`connector` is (scheduler side, worker side) as of host_connector, or None."""

    def __init__(
        self,
        *,
        blocks: int = 32,
        block_size: int = 4,
        max_batched_tokens: int = 64,
        max_requests: int = 16,
        prefix_caching: bool = True,
        connector=None,
        memory=SimulatedMemory,
    ) -> None:
        self.block_size = block_size
        self.connector = connector
        self.blocks = BlockPool(blocks)
        self.memory = memory(blocks, block_size)
        limits = SchedulerLimits(block_size, max_batched_tokens, max_requests, prefix_caching)
        self.scheduler = Scheduler(self.blocks, limits, connector[0] if connector else None)
        if connector is not None:
            connector[1].register_kv_pool(self.memory)
            connector[0].bind_block_pool(self.blocks, {"engine": "simulated"}, "")
        self.core = EngineCore(
            runner=SimulatedRunner(self.memory),
            scheduler=self.scheduler,
            stop_token_ids=frozenset([STOP]),
            connector=connector,
        )

    def add(self, prompt: list[int], *, request_id: str | None = None, **params) -> Result:
        result = Result()
        settings = SamplingParams(**({"ignore_eos": True} | params))
        request = Request(
            request_id=request_id or f"request-{next(_ids)}",
            prompt_token_ids=prompt,
            params=settings,
            on_output=result,
            block_size=self.block_size,
            hash_root=hashing.root(b"simulated", salt=settings.cache_salt),
            sampling_seed=0,
            max_output_tokens=settings.max_tokens,
        )
        result.request = request
        self.core.add(request)
        return result

    def step(self) -> bool:
        has_computed = self.core.step()
        check_pool(self.blocks)
        return has_computed

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.core.has_work:
                assert self.blocks.used_count == 0, f"{self.blocks.used_count} blocks leaked"
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps")

    def answer(self, prompt: list[int], **params) -> Result:
        """Run one request to its end, and prove it."""
        result = self.add(prompt, **params)
        self.run()
        assert result.token_ids == expected_output(prompt, len(result.token_ids))
        return result
