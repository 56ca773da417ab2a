"""An executor like TensorRT-LLM's, with real bytes: each rank is a thread with a KV pool, and every token of a request
depends on every byte of KV before it. So a wrong block gives wrong tokens.

    engine = Engine(version, rank_count=2, overlaps=True)
    engine.run([Script(request_id, prompt, max_new_tokens, ...)]) -> {request_id: tokens}
    expected(script, rank_count=2)                                -> the tokens without any cache

Blocks that are released are overwritten with garbage at once, so that a copy that reads or writes too late is detected.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import torch
from interface import Collectives, Manager, State, Version, arguments, installed, require_attention_dp

from kvbm.engines.trtllm.rank_side import RankSide

BLOCK = 4
LAYERS = 2
LANE_BYTES = 8  # bytes of one token in one layer, key or value
TOKEN_BYTES = LAYERS * 2 * LANE_BYTES
GARBAGE = 0xEE
VOCABULARY = 1000
END = 7  # a token divisible by END ends a request that stops early


@dataclass(frozen=True)
class Script:
    """One request of a test. `flavor` stands for an adapter or an image: it changes the KV."""

    request_id: int
    prompt: tuple[int, ...]
    max_new: int = 6
    arrives: int = 0
    aborts_at: int | None = None
    stops_early: bool = False
    salt: str | None = None
    adapter: int | None = None
    media: tuple[str, ...] | None = None
    has_media: bool = False
    priority: int | None = None

    @property
    def flavor(self) -> str:
        return f"{self.adapter}/{self.media}/{self.request_id if self.has_media and not self.media else ''}"


def _kv(context: Any, token: int, flavor: str, rank: int) -> bytes:
    return blake2b(context.digest() + f"{token}/{flavor}/{rank}".encode(), digest_size=TOKEN_BYTES).digest()


def _sampled(digests: list[bytes]) -> int:
    return int.from_bytes(blake2b(b"".join(digests)).digest()[:4], "little") % VOCABULARY


def expected(script: Script, rank_count: int) -> list[int]:
    """Return the tokens that a request generates, computed without a cache."""
    contexts = [blake2b() for _ in range(rank_count)]
    tokens, generated, computed = list(script.prompt), [], 0
    while len(generated) < script.max_new:
        for token in tokens[computed:]:
            for rank, context in enumerate(contexts):
                context.update(_kv(context, token, script.flavor, rank))
        computed = len(tokens)
        token = _sampled([context.digest() for context in contexts])
        tokens.append(token)
        generated.append(token)
        if script.stops_early and token % END == 0:
            break
    return generated


class Request:
    """What the bindings expose of a request, and, from `script` on, what only the executor sees."""

    def __init__(self, script: Script) -> None:
        self.request_id = self.py_request_id = script.request_id
        self.state = State.CONTEXT_INIT
        self.context_current_position = 0
        self.context_chunk_size = 0
        self.is_generation_only_request = False
        self.is_dummy_request = False
        self.cache_salt = script.salt
        self.lora_task_id = script.adapter
        self.multimodal_hashes = list(script.media) if script.media else None
        self.multimodal_positions = [0] if script.has_media else None
        self.priority = script.priority
        self.script = script
        self.host_tokens = list(script.prompt)  # as the host sees them
        self.device_tokens = list(script.prompt)
        self.context_length = len(script.prompt)
        self.blocks: list[int] = []
        self.was_added = False

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.host_tokens)

    @property
    def context_remaining_length(self) -> int:
        return self.context_length - self.context_current_position


class Cache:
    """G1 of one rank: blocks with reference counts, kept for reuse when nobody uses them, evicted in order of use.

    A block has an id in each layer group; the ids of the second group are not those of the first.
    """

    def __init__(self, block_count: int, group_count: int, rank: int) -> None:
        self.block_count, self.rank = block_count, rank
        layers = LAYERS // group_count
        shape = (block_count, layers, 2, BLOCK * LANE_BYTES)
        self.pools = [torch.full(shape, GARBAGE, dtype=torch.uint8) for _ in range(group_count)]
        orders = [range(block_count - 1, -1, -1), [(block + 3) % block_count for block in range(block_count)]]
        self.ids = [list(order) for order in orders[:group_count]]
        self._views = [pool.numpy().reshape(block_count, layers, 2, BLOCK, LANE_BYTES) for pool in self.pools]
        self._free = list(range(block_count))
        self._references = [0] * block_count
        self._stored: OrderedDict[Any, int] = OrderedDict()  # prefix -> block
        self._keys: dict[int, Any] = {}

    def block_ids(self, request: Request) -> list[list[int]]:
        return [[ids[block] for block in request.blocks] for ids in self.ids]

    def available(self) -> int:
        return len(self._free) + sum(not self._references[block] for block in self._stored.values())

    def take(self) -> int | None:
        if not self._free:
            idle = next((key for key, block in self._stored.items() if not self._references[block]), None)
            if idle is None:
                return None
            block = self._stored.pop(idle)
            del self._keys[block]
            self._scrap(block)
        block = self._free.pop(0)
        self._references[block] = 1
        return block

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if not self._references[block] and block not in self._keys:
                self._scrap(block)

    def _scrap(self, block: int) -> None:
        for ids, pool in zip(self.ids, self.pools, strict=True):
            pool[ids[block]] = GARBAGE
        self._free.append(block)

    def reusable(self, request: Request) -> list[int]:
        tokens, found = request.host_tokens, []
        for end in range(BLOCK, len(tokens), BLOCK):
            block = self._stored.get(self._key(request, end))
            if block is None:
                break
            found.append(block)
        return found

    def store(self, request: Request, computed: int) -> None:
        """Keep the full blocks of the first `computed` tokens for reuse."""
        for index in range(min(computed // BLOCK, len(request.blocks))):
            key, block = self._key(request, (index + 1) * BLOCK), request.blocks[index]
            if key in self._stored:
                self._stored.move_to_end(key)
            elif block not in self._keys:
                self._stored[key], self._keys[block] = block, key

    def clear(self) -> None:
        """Forget what is kept for reuse."""
        for block in list(self._stored.values()):
            del self._keys[block]
            if not self._references[block]:
                self._scrap(block)
        self._stored.clear()

    def _key(self, request: Request, end: int) -> Any:
        script = request.script
        return (script.salt, script.flavor, tuple(request.device_tokens[:end]))

    def read(self, request: Request, tokens: int) -> bytes:
        """The KV of the first tokens, token after token."""
        parts = []
        for index in range(-(-tokens // BLOCK)):
            block = request.blocks[index]
            layers = [view[ids[block]] for view, ids in zip(self._views, self.ids, strict=True)]
            for offset in range(min(BLOCK, tokens - index * BLOCK)):
                parts += [layer[:, :, offset].tobytes() for layer in layers]
        return b"".join(parts)

    def write(self, request: Request, position: int, kv: bytes) -> None:
        block, offset = request.blocks[position // BLOCK], position % BLOCK
        share = len(kv) // len(self._views)
        for group, (view, ids) in enumerate(zip(self._views, self.ids, strict=True)):
            part = torch.frombuffer(bytearray(kv[group * share : (group + 1) * share]), dtype=torch.uint8).numpy()
            view[ids[block], :, :, offset] = part.reshape(view.shape[1], 2, LANE_BYTES)

    def layout(self) -> Any:
        """The V2 form: one region per layer and group."""
        groups = []
        for group, pool in enumerate(self.pools):
            size = pool[0, 0].numel()
            regions = [
                SimpleNamespace(
                    base=pool.data_ptr() + layer * size,
                    size=size,
                    stride=pool.stride(0),
                    num_slots=self.block_count,
                    buffers=[],
                )
                for layer in range(pool.shape[1])
            ]
            values = {"layer_ids": [group], "window_size": None, "regions": regions, "replicated_regions": []}
            groups.append(SimpleNamespace(layer_group_id=group, **values))
        return SimpleNamespace(tokens_per_block=BLOCK, groups=groups, gpu_pool_mapping_bytes=1 << 21)


@dataclass
class Batch:
    contexts: list[tuple[Request, int]] = field(default_factory=list)
    generations: list[Request] = field(default_factory=list)
    sampled: list[tuple[Request, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.contexts or self.generations)


class Rank:
    """The executor of one rank. Every rank makes the same decisions, from the same requests."""

    def __init__(self, engine: Engine, rank: int, manager: Manager, cache: Cache) -> None:
        self.engine, self.rank, self.manager, self.cache = engine, rank, manager, cache
        self.active: list[Request] = []
        self.done: dict[int, list[int]] = {}
        self.unscheduled: Batch | None = None
        self.previous: Batch | None = None
        self.saving: list[Request] = []
        self.aborted: list[int] = []

    def run(self, scripts: list[Script]) -> dict[int, list[int]]:
        waiting = sorted(scripts, key=lambda script: (script.arrives, script.request_id))
        iteration = 0
        while waiting or self.active or self.saving or self.previous:
            while waiting and waiting[0].arrives <= iteration:
                self.active.append(Request(waiting.pop(0)))
            for request in [one for one in self.active if one.script.aborts_at == iteration]:
                self.aborted.append(request.request_id)
                self._end(request)
            self._iterate()
            iteration += 1
            assert iteration < self.engine.max_iterations, f"{[(r.request_id, r.state) for r in self.active]} hang"
        return self.done

    def _iterate(self) -> None:
        batch = self._schedule()
        if batch:
            self._prepare(batch)
            contexts = [request for request, _ in batch.contexts]
            ready = set(map(id, self.manager.take_scheduled_requests_pending_load(contexts)))
            batch.contexts = [one for one in batch.contexts if id(one[0]) in ready]
            self.manager.handle_metadata()
            self.manager.worker.start_load_kv(None)
        if batch:
            self._forward(batch)
        if self.engine.overlaps:
            batch, self.previous = self.previous or Batch(), batch or None
        for request, token in batch.sampled:
            self._append(request, token)
        for request, _ in batch.contexts:
            self.cache.store(request, request.context_current_position)
        for request in self.manager.get_finished():
            self.cache.release(request.blocks)
            request.blocks = []
            self.saving.remove(request)
        if not batch and not self.previous:
            time.sleep(0.0005)

    def _schedule(self) -> Batch:
        """Generations first, then context chunks within the budget, then new requests that fit to their end."""
        batch, budget, planned = Batch(), self.engine.budget, 0
        for request in list(self.active):
            if request.state is State.GENERATION_IN_PROGRESS and request in self.active and self._has_room(request):
                batch.generations.append(request)
        for request in self.active:
            if request.state is not State.CONTEXT_INIT or budget < BLOCK:
                continue
            if not request.blocks:
                if not self._fits(request, planned):
                    break
                planned += self._needs(request)
            count = request.context_remaining_length if request.blocks else request.context_length
            chunk = min(count, budget)
            budget -= chunk
            batch.contexts.append((request, chunk))
        batch.generations = [request for request in batch.generations if request in self.active and request.blocks]
        return batch

    def _needs(self, request: Request) -> int:
        script = request.script
        return -(-(len(script.prompt) + script.max_new + 2) // BLOCK)

    def _fits(self, request: Request, planned: int) -> bool:
        if self.engine.preempts:
            return self.cache.available() > -(-request.context_length // BLOCK) + planned
        promised = sum(max(0, self._needs(one) - len(one.blocks)) for one in self.active if one.blocks)
        return self.cache.available() >= promised + planned + self._needs(request)

    def _has_room(self, request: Request) -> bool:
        if len(request.device_tokens) <= len(request.blocks) * BLOCK:
            return True
        if (block := self.cache.take()) is None:
            assert self.engine.preempts, "a scheduled request fits to its end"
            self._pause(next(one for one in reversed(self.active) if one.blocks))
            return self._has_room(request) if request.blocks else False
        request.blocks.append(block)
        return True

    def _pause(self, request: Request) -> None:
        """Take the blocks of a request away; it computes everything again. Only V2 managers do that."""
        self.engine.pauses += 1
        if self.previous is not None:  # its token is in flight
            self.previous.sampled = [one for one in self.previous.sampled if one[0] is not request]
        request.device_tokens = list(request.host_tokens)
        self.manager.request_reset(request)
        self.cache.release(request.blocks)
        request.blocks = []
        request.state, request.context_current_position = State.CONTEXT_INIT, 0
        request.context_length = len(request.host_tokens)

    def _prepare(self, batch: Batch) -> None:
        for request, _ in batch.contexts:
            if not request.blocks and self.manager.should_add_sequence(request):
                self._add_sequence(request)
        batch.contexts = [
            (request, min(chunk, request.context_remaining_length))
            for request, chunk in batch.contexts
            if request.blocks
        ]
        for request, chunk in batch.contexts:
            request.context_chunk_size = chunk
        self.manager.build_scheduler_output([request for request, _ in batch.contexts], batch.generations)

    def _add_sequence(self, request: Request) -> None:
        found = self.cache.reusable(request)
        self.cache.hold(found)
        on_device = len(found) * BLOCK
        external = self.manager.get_num_new_matched_tokens(request, on_device)
        assert external % BLOCK == 0
        assert on_device + external < request.context_length, "the last token must be computed"
        self.engine.external_tokens += external
        request.blocks = found
        while len(request.blocks) * BLOCK < request.context_length:
            block = self.cache.take()
            assert block is not None
            request.blocks.append(block)
        request.was_added = True
        request.context_current_position = on_device + external
        self.manager.update_state_after_alloc(request, self.cache.block_ids(request))

    def _forward(self, batch: Batch) -> None:
        for layer in range(LAYERS):
            self.manager.worker.wait_for_layer_load(layer, None)
        spans = [
            (one, one.context_current_position, one.context_current_position + chunk) for one, chunk in batch.contexts
        ]
        spans += [(one, len(one.device_tokens) - 1, len(one.device_tokens)) for one in batch.generations]
        digests = []
        for request, begin, end in spans:
            context = blake2b(self.cache.read(request, begin))
            for position in range(begin, end):
                kv = _kv(context, request.device_tokens[position], request.script.flavor, self.rank)
                self.cache.write(request, position, kv)
                context.update(kv)
            digests.append(context.digest())
        for layer in range(LAYERS):
            self.manager.worker.save_kv_layer(layer, None)
        self.manager.worker.wait_for_save(None)
        everyone = self.engine.collectives.allgather(digests)
        for index, (request, _, end) in enumerate(spans):
            if request.state is State.CONTEXT_INIT:
                request.context_current_position = end
                if end < request.context_length:
                    continue
                request.state = State.GENERATION_IN_PROGRESS
            token = _sampled([digests[index] for digests in everyone])
            request.device_tokens.append(token)
            batch.sampled.append((request, token))

    def _append(self, request: Request, token: int) -> None:
        """The host learns a token, and whether the request has ended."""
        if request.state is not State.GENERATION_IN_PROGRESS or request not in self.active:
            return
        request.host_tokens.append(token)
        script = request.script
        generated = len(request.host_tokens) - len(script.prompt)
        if generated == script.max_new or (script.stops_early and token % END == 0):
            self.done[request.request_id] = request.host_tokens[len(script.prompt) :]
            self.cache.store(request, len(request.host_tokens) - 1)
            self._end(request)

    def _end(self, request: Request) -> None:
        self.active.remove(request)
        if not request.was_added:
            return
        if self.manager.request_finished(request, self.cache.block_ids(request)):
            self.saving.append(request)
        else:
            request.state = State.GENERATION_COMPLETE
            self.cache.release(request.blocks)
            request.blocks = []


class Engine:
    """All ranks of one engine with the connector, or without one if `host_blocks` is 0."""

    def __init__(
        self,
        version: Version,
        *,
        rank_count: int = 1,
        overlaps: bool = False,
        device_blocks: int = 24,
        host_blocks: int = 200,
        budget: int = 16,
        preempts: bool = False,
        config: dict[str, Any] | None = None,
        max_iterations: int = 20_000,
        **engine_arguments: Any,
    ) -> None:
        self.version, self.rank_count, self.overlaps, self.budget = version, rank_count, overlaps, budget
        self.preempts, self.max_iterations = preempts, max_iterations
        self.collectives = Collectives(rank_count)
        self.external_tokens = self.pauses = 0
        self.config = {"tiers": {"host": {"blocks": host_blocks}}, **(config or {})}
        self._installed = installed(version, self.collectives)
        self._device_blocks, self._arguments = device_blocks, engine_arguments
        self.ranks: list[Rank] = []

    def __enter__(self) -> Engine:
        self.connector, self.interface = self._installed.__enter__()
        self.connector.os.environ["TLLM_KVBM_CONFIG"] = json.dumps(self.config)
        try:
            values = arguments(self.version, block_tokens=BLOCK, rank_count=self.rank_count, **self._arguments)
            leader, worker = self.connector.DynamoKVBMConnectorLeader, self.connector.DynamoKVBMConnectorWorker
            if self._arguments.get("enable_attention_dp") and self.version.is_grouped:
                require_attention_dp(leader, worker)
            self.leader = leader(values)
            self.workers = [worker(values) for _ in range(self.rank_count)]
            groups = 2 if self.version.is_grouped else 1
            self.caches = [Cache(self._device_blocks, groups, rank) for rank in range(self.rank_count)]
            self.in_ranks(self._register)
        except BaseException:
            self.__exit__()
            raise
        self.ranks = [Rank(self, rank, self._manager(rank), self.caches[rank]) for rank in range(self.rank_count)]
        return self

    def __exit__(self, *_: object) -> None:
        for part in (getattr(self, "leader", None), *getattr(self, "workers", ())):
            if part is not None:
                part.shutdown()
        RankSide.leader = None
        del self.connector.os.environ["TLLM_KVBM_CONFIG"]
        self._installed.__exit__(None, None, None)

    def _register(self, rank: int) -> None:
        if self.version.is_grouped:
            self.workers[rank].register_kv_cache_layout(self.caches[rank].layout())
        else:
            self.workers[rank].register_kv_caches(self.caches[rank].pools[0])

    def _manager(self, rank: int) -> Manager:
        scheduler = self.leader if rank == 0 else None
        worker, cache = self.workers[rank], self.caches[rank]
        return Manager(self.version, self.interface, self.collectives, worker, scheduler, cache)

    def in_ranks(self, run: Callable[[int], Any]) -> list[Any]:
        """Run it in one thread per rank; raise the first exception."""
        results: list[Any] = [None] * self.rank_count
        errors: list[BaseException] = []

        def target(rank: int) -> None:
            self.collectives.enter(rank)
            try:
                results[rank] = run(rank)
            except BaseException as error:
                errors.append(error)
                self.collectives.abort()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.rank_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])
        return results

    def run(self, scripts: list[Script]) -> dict[int, list[int]]:
        """Return the tokens of every request that was not aborted."""
        results = self.in_ranks(lambda rank: self.ranks[rank].run(scripts))
        assert all(result == results[0] for result in results)
        done = results[0]
        for rank in self.ranks:
            rank.done = {}
        return done

    def forget_device(self) -> None:
        """Empty G1: what the next requests reuse comes from the connector."""
        for cache in self.caches:
            cache.clear()

    @property
    def counters(self) -> Any:
        return self.leader.side.leader.counters

    def wait_for_saves(self) -> None:
        """Let the copies in flight end, as idle iterations of the engine do."""

        def poll(rank: int) -> None:
            for _ in range(2000):
                self.ranks[rank].manager.get_finished()
                busy = [worker.is_busy() for worker in self.workers[rank].side._workers]
                if not any(map(any, self.collectives.allgather(busy))):
                    break
                time.sleep(0.0005)
            self.ranks[rank].manager.get_finished()

        self.in_ranks(poll)
