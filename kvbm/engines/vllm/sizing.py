"""Block sizes of vLLM, and the number of blocks that its arguments set. Defaults follow vLLM 0.32.

A block of vLLM has one page of every layer of a group (`sizing_groups`). The arguments, the model's configuration and
the kind of device decide how many tokens it has:

    block_size                    as given
    CPU                           128 tokens; with latent attention, the attention backend decides (`cpu`)
    GPU                           16 tokens; with latent attention, the attention backend raises it to 64 or 128
    models with states            enough tokens that a page of attention is at least as large as a state
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from kvbm.config.engine import VllmArguments
from kvbm.config.heads import have_layers_equal_heads
from kvbm.config.values import count_of
from kvbm.engines.vllm.cpu import PLAIN, LatentAttention, keeps_narrow_gdn, latent_attention, widens_states
from kvbm.engines.vllm.models import KINDS_OF_STATES
from kvbm.engines.vllm.sizing_groups import CacheGroup, cache_groups
from kvbm.engines.vllm.state_settings import (
    CPU_BLOCK_TOKENS,
    GDN,
    RETENTION,
    disabling_argument,
    unsupported,
)
from kvbm.sizing.checkpoint import cache_type_of, require_known_scheme
from kvbm.sizing.families.facts import ModelFacts, SizeUnknown, positions
from kvbm.sizing.families.layer_specs import FLOAT32_BYTES, LayerKind, LayerSpec, Ranks
from kvbm.sizing.families.states import GDN_STATE_TYPE
from kvbm.sizing.families.table import architecture_of, layer_specs, state_kind
from kvbm.sizing.gpu import MemoryEstimate
from kvbm.sizing.tiers import ESTIMATE, Device, SnapshotSize
from kvbm.sizing.wanted import Cpu

GPU_BLOCK_TOKENS = 16
LATENT_GPU_BLOCK_TOKENS = 64
CPU_KERNEL_TOKENS, GPU_KERNEL_TOKENS = 32, 16  # the smallest block of the attention kernels
LATENT_ALIGNMENT = 128  # of models with latent attention and states
BACKEND_NOTE = "the attention backend may choose another block size; set `engine.arguments.block_size` to fix it"
CPU_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
LAYOUT_VARIABLE = "VLLM_KV_CACHE_LAYOUT"
CHUNKS_VARIABLE = "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"
MLA_VARIABLE = "VLLM_MLA_DISABLE"
STAGES_VARIABLE = "VLLM_PP_LAYER_PARTITION"

_ELEMENT_BYTES = {"float": 4, "float32": 4}
_CACHE_ELEMENT_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2}
_BATCHED_TOKENS = 2048
_UNKNOWN_FLAGS = (
    "speculative_config",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "kv_cache_dtype_skip_layers",
    "hf_overrides",
    "disable_sliding_window",
    "mamba_cache_dtype",
    "mamba_block_size",
    "quantization",
)
_KNOWN_VALUES = {  # of arguments that would change the cache with any other value
    "convert": ("auto", "none"),
    "mamba_cache_mode": ("align", "none"),  # vLLM replaces `none` by `align` if prefix caching is on
    "model_impl": ("auto", "vllm"),
    "runner": ("auto", "generate"),
}
_STATE_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_IGNORES_CACHE_TYPE = {"FalconForCausalLM"}
_NARROW = "vLLM stores the cache of this model in 8 bits by default"
_FP8_BY_DEFAULT = {"GlmMoeDsaForCausalLM"}  # on GPUs of compute capability 10.x


@dataclass(frozen=True, slots=True)
class Setting:
    """Where vLLM runs: its environment variables, whether on a CPU and on which one, and the compute capability of the
    GPU if known."""

    variables: Mapping[str, str]
    on_cpu: bool
    capability: int | None = None
    cpu: Cpu = PLAIN

    @property
    def disables_latent(self) -> bool:
        return self.variables.get(MLA_VARIABLE, "0") not in ("", "0")

    @property
    def may_be_blackwell(self) -> bool:
        return not self.on_cpu and (self.capability is None or self.capability // 10 == 10)


@dataclass(frozen=True, slots=True)
class Model:
    """A model, by its configuration, with these arguments of vLLM. The functions of this module raise ProfileError if
    the configuration lacks a fact, SizeUnknown if only vLLM knows the layout of its cache."""

    arguments: VllmArguments
    config: Mapping[str, object]
    setting: Setting

    @property
    def flags(self) -> Mapping[str, object]:
        """Arguments that a profile does not declare."""
        return self.arguments.model_extra or {}

    @property
    def longest_tokens(self) -> int | None:
        """The maximum length of a sequence, None if unknown."""
        return count_of(self.arguments.max_model_len) or positions(self.config)

    @property
    def is_narrow_by_default(self) -> bool:
        return self.arguments.kv_cache_dtype in (None, "auto") and architecture_of(self.config) in _FP8_BY_DEFAULT


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """How vLLM stores a model: its groups, the tokens in a block of attention, all layers, and what is assumed."""

    groups: tuple[CacheGroup, ...]
    block_tokens: int
    layers: range
    notes: tuple[str, ...]
    latent: LatentAttention | None = None  # on a CPU

    @property
    def token_bytes(self) -> int:
        """Bytes on one rank of a token that all its layers keep, beyond every window and without states."""
        specs = (spec for group in self.groups for spec in group.specs)
        return sum(spec.token_bytes for spec in specs if spec.kind.keeps_all_tokens)

    @property
    def snapshot(self) -> SnapshotSize | None:
        """The snapshot of one rank, None for a model without states."""
        groups = [group for group in self.groups if group.kind is LayerKind.STATE]
        state_bytes = sum(spec.state_bytes for group in groups for spec in group.specs)
        return SnapshotSize(len(groups), state_bytes, state_bytes // self.token_bytes) if groups else None

    @property
    def keeps_intervals(self) -> bool:
        """Whether vLLM accepts an interval of what it keeps for later prompts."""
        return any(group.kind in (LayerKind.STATE, LayerKind.WINDOW) for group in self.groups)

    def stored_blocks(self, tokens: int) -> int:
        """Blocks that kvbm stores of a sequence of `tokens`."""
        return sum(group.stored_blocks(tokens) for group in self.groups)


def plan_of(model: Model) -> VllmPlan:
    specs = layer_specs(model.config, _ranks(model))
    _require_known_cache(model, {spec.kind for spec in specs})
    latent = latent_on_cpu(model, specs)
    tokens, notes = _block_tokens(model, specs, latent)
    layers = range(_layer_count(model.config, specs))
    return VllmPlan(_groups(model, specs, tokens), tokens, layers, notes, latent)


def device(
    model: Model,
    *,
    sequence_tokens: int | None = None,
    memory: MemoryEstimate | None = None,
    shares_equal_kv: bool = True,
) -> Device:
    """Return the blocks of G1. `sequence_tokens` is by default the maximum length.

    With `shares_equal_kv`, ranks with equal KV have one copy in host memory.
    With `memory`, the number of blocks is estimated if no argument sets it.
    """
    plan, arguments = plan_of(model), model.arguments
    tensor_parallel, stage_count = arguments.tensor_parallel_size or 1, arguments.pipeline_parallel_size or 1
    stages = _stages(len(plan.layers), stage_count, model.setting.variables.get(STAGES_VARIABLE))
    block_bytes = tuple(max(group.bytes_on(stage) for group in plan.groups) for stage in stages)
    if not all(block_bytes):
        raise SizeUnknown("a pipeline stage has no layer with a cache of its own, so only vLLM knows its blocks")
    block_count, set_by = _block_count(model, max(block_bytes))
    notes = plan.notes
    if block_count is None and memory is not None:
        ranks = tensor_parallel * stage_count
        block_count, set_by = memory.cache_bytes(ranks) // max(block_bytes), ESTIMATE
        notes += (f"G1 is an estimate: {memory.formula(ranks)}",)
    longest, in_flight = model.longest_tokens, _in_flight(arguments)
    length = sequence_tokens or longest or 0
    replicas = _replica_count(plan, model.config, tensor_parallel) if shares_equal_kv else 1
    if replicas > 1:
        notes += (f"{replicas} ranks have equal KV, of which G2 and G3 keep one copy",)
    snapshot, stored_blocks = plan.snapshot, 0
    stored_longest: tuple[int, int] | None = None
    if snapshot is not None:
        notes += tuple(_snapshot_notes(arguments, plan, length))
        snapshot = replace(snapshot, state_bytes=snapshot.state_bytes * tensor_parallel)
        stored_blocks = plan.stored_blocks(length) if length else 0
        stored_longest = (longest, plan.stored_blocks(longest)) if longest else None
    return Device(
        block_tokens=plan.block_tokens,
        rank_block_bytes=tuple(size for size in block_bytes for _ in range(tensor_parallel)),
        block_count=block_count,
        set_by=set_by,
        group_count=len(plan.groups),
        token_count=_token_count(plan.groups, block_count, longest, in_flight),
        token_bytes=plan.token_bytes * tensor_parallel,
        sequence_tokens=length,
        sequence_blocks=sum(group.blocks(length, in_flight=0) for group in plan.groups) if length else 0,
        notes=notes,
        replica_count=replicas,
        attention_backend=None if plan.latent is None else plan.latent.backend,
        snapshot=snapshot,
        stored_sequence_blocks=stored_blocks,
        stored_longest=stored_longest,
    )


def _replica_count(plan: VllmPlan, model_config: Mapping[str, object], ranks: int) -> int:
    """Return the number of consecutive ranks with equal KV in every layer, by the rules of
    `engines/vllm/replicas.py`."""
    specs = [spec for group in plan.groups for spec in group.specs]
    kinds, counts = {spec.kind for spec in specs}, {spec.replicas for spec in specs}
    if len(counts) > 1:
        return 1
    replicas = counts.pop()
    if LayerKind.LATENT in kinds:
        return replicas if kinds <= {LayerKind.LATENT, LayerKind.INDEX} else 1
    is_certain = have_layers_equal_heads(ModelFacts.of(model_config), ranks // replicas)
    return replicas if is_certain and kinds <= {LayerKind.FULL, LayerKind.WINDOW, LayerKind.CHUNKED} else 1


def _require_known_cache(model: Model, kinds: set[LayerKind]) -> None:
    """SizeUnknown for settings that matter only to some kinds of layers."""
    if LayerKind.LATENT in kinds and model.setting.disables_latent:
        raise SizeUnknown(f"with `{MLA_VARIABLE}`, only vLLM knows the size of a block")
    backend = model.flags.get("attention_backend") or model.flags.get("attention_config")
    if backend is not None and model.arguments.block_size is None and not model.setting.on_cpu:
        raise SizeUnknown(
            "the chosen attention backend decides how many tokens a block has", hint="set `engine.arguments.block_size`"
        )


def default_block_tokens(arguments: VllmArguments, *, on_cpu: bool) -> int:
    """Tokens in a block of a model without latent attention and states."""
    return arguments.block_size or (CPU_BLOCK_TOKENS if on_cpu else GPU_BLOCK_TOKENS)


def check(arguments: VllmArguments, model_config: Mapping[str, object]) -> None:
    """ProfileError or SizeUnknown for a problem of the model alone."""
    layer_specs(model_config, _ranks(Model(arguments, model_config, Setting({}, on_cpu=False))))


def latent_on_cpu(model: Model, specs: Sequence[LayerSpec]) -> LatentAttention | None:
    """None for a model without latent attention, and on a GPU."""
    kinds, setting = {spec.kind for spec in specs}, model.setting
    if LayerKind.LATENT not in kinds or setting.disables_latent or not setting.on_cpu:
        return None
    return latent_attention(model.arguments, setting.cpu)


def _ranks(model: Model) -> Ranks:
    arguments, extra = model.arguments, model.flags
    reason = disabling_argument(arguments)
    if reason is not None and state_kind(model.config) is not None:
        name, why = reason
        text = f"kvbm is disabled with these settings, so there is no size: {why} (`{name}`)"
        raise SizeUnknown(text, hint=f"remove `{name}`")
    for flag in _UNKNOWN_FLAGS:
        if extra.get(flag) not in (None, False, 1):
            raise SizeUnknown(f"with `{flag}`, only vLLM knows the size of a block")
    state_type = extra.get("mamba_ssm_cache_dtype", "auto")
    if state_type != "auto" and state_type not in _STATE_ELEMENT_BYTES:
        raise SizeUnknown(f"with `mamba_ssm_cache_dtype: {state_type}`, only vLLM knows the size of a block")
    for flag, known in _KNOWN_VALUES.items():
        if extra.get(flag) not in (None, *known):
            raise SizeUnknown(f"with `{flag}: {extra[flag]}`, only vLLM knows the size of a block")
    model_bytes = _ELEMENT_BYTES.get(arguments.dtype or "auto", 2)  # `auto` converts float32 to a 16-bit type
    tensor_parallel = arguments.tensor_parallel_size or 1
    kinds = {spec.kind for spec in layer_specs(model.config, Ranks(tensor_parallel))}
    if model.is_narrow_by_default and model.setting.capability is not None and model.setting.may_be_blackwell:
        raise SizeUnknown(f"on a GPU of compute capability 10.x, {_NARROW}, in a format that only vLLM knows")
    return Ranks(
        tensor_parallel=tensor_parallel,
        cache_bytes=_cache_bytes(model, model_bytes, kinds),
        model_bytes=model_bytes,
        state_bytes=_state_bytes(model, _STATE_ELEMENT_BYTES.get(str(state_type))),
    )


def _state_bytes(model: Model, named: int | None) -> int | None:
    """Bytes of one element of a state, None if the model decides. `named`: what the argument says."""
    cpu = model.setting.cpu
    if not (model.setting.on_cpu and widens_states(cpu)):
        return named
    kept = named or _STATE_ELEMENT_BYTES.get(str(ModelFacts.of(model.config).get(GDN_STATE_TYPE)))
    is_kept = kept is not None and keeps_narrow_gdn(cpu) and state_kind(model.config) == GDN
    return kept if is_kept else FLOAT32_BYTES


def _cache_bytes(model: Model, model_bytes: int, kinds: set[LayerKind]) -> int:
    """Bytes of one element: `auto` follows the checkpoint's `quantization_config`, or else the type of the model."""
    require_known_scheme(model.config)
    kept, source = _cache_type(model, kinds)
    if kept is None:
        return model_bytes
    named = f"{source}: {kept}" if "`" in source else f"`{source}: {kept}`"
    if architecture_of(model.config) in _IGNORES_CACHE_TYPE:
        raise SizeUnknown(f"vLLM ignores {named} for this model")
    if kept not in _CACHE_ELEMENT_BYTES or (LayerKind.INDEX in kinds and _CACHE_ELEMENT_BYTES[kept] != 2):
        raise SizeUnknown(f"with {named}, only vLLM knows the size of a block")
    return _CACHE_ELEMENT_BYTES[kept]


def _cache_type(model: Model, kinds: set[LayerKind]) -> tuple[str | None, str]:
    """Return the type of the cache, None if it follows the model, and what names it."""
    if model.arguments.kv_cache_dtype not in (None, "auto"):
        return model.arguments.kv_cache_dtype, "kv_cache_dtype"
    found = cache_type_of(model.config, has_plain_attention=kinds <= {LayerKind.FULL, LayerKind.WINDOW})
    return found, "the checkpoint's `quantization_config`: KV cache"


def _block_tokens(
    model: Model, specs: Sequence[LayerSpec], latent: LatentAttention | None
) -> tuple[int, tuple[str, ...]]:
    """Return the tokens in a block of attention, and what is assumed."""
    arguments, setting, on_cpu = model.arguments, model.setting, model.setting.on_cpu
    kinds = {spec.kind for spec in specs}
    is_latent, has_states = LayerKind.LATENT in kinds, LayerKind.STATE in kinds
    tokens = default_block_tokens(arguments, on_cpu=on_cpu)
    notes: list[str] = []
    if latent is not None:
        tokens = latent.block_tokens
        notes.append(latent.note)
    elif is_latent and not on_cpu and not has_states and arguments.block_size is None:
        tokens = LATENT_GPU_BLOCK_TOKENS
    if LayerKind.INDEX in kinds and not is_latent and arguments.block_size is None:
        tokens = max(tokens, 128)  # the block of MiniMax M3's sparse attention
    dims = {dim for spec in specs if spec.kind is not LayerKind.LATENT for dim in spec.shape[1:]}
    has_wide_heads = (256 in dims and setting.may_be_blackwell) or 512 in dims  # larger blocks on Blackwell, or for FP8
    if not on_cpu and arguments.block_size is None and ((is_latent and not has_states) or has_wide_heads):
        notes.append(BACKEND_NOTE)
    if setting.may_be_blackwell and model.is_narrow_by_default:
        notes.append(f"on a GPU of compute capability 10.x, {_NARROW}, which is about half")
    kind = state_kind(model.config) if has_states else None
    if kind is not None and kind not in KINDS_OF_STATES:
        notes.append(f"{unsupported(kind)}: the sizes describe vLLM's cache only")
    if has_states:
        kernel = CPU_KERNEL_TOKENS if on_cpu else GPU_KERNEL_TOKENS
        if latent is not None:
            kernel = latent.kernel_tokens
        tokens = _tokens_of_state(specs, tokens, kernel, is_latent=is_latent)
    return tokens, tuple(notes)


def _tokens_of_state(specs: Sequence[LayerSpec], tokens: int, kernel: int, *, is_latent: bool) -> int:
    """Return the tokens in a block whose page of attention holds a state."""
    state_bytes = max(spec.state_bytes for spec in specs)
    token_bytes = max(spec.token_bytes for spec in specs)
    if not token_bytes:
        raise SizeUnknown("for a model with states and no attention, only vLLM knows the size of a block")
    alignment = max(kernel, tokens, LATENT_ALIGNMENT if is_latent else 0)
    return max(tokens, kernel * ceil(alignment * ceil(state_bytes / (alignment * token_bytes)) / kernel))


def _groups(model: Model, specs: Sequence[LayerSpec], tokens: int) -> tuple[CacheGroup, ...]:
    variables = model.setting.variables
    token_bytes = max(spec.token_bytes for spec in specs)
    blocks = [
        spec.with_block(tokens, padded_bytes=tokens * token_bytes if spec.kind is LayerKind.STATE else 0)
        for spec in specs
    ]
    has_chunks = any(spec.kind is LayerKind.CHUNKED for spec in specs)
    allows_chunks = variables.get(CHUNKS_VARIABLE, "1") not in ("", "0")
    return cache_groups(
        blocks,
        blocks_outermost=variables.get(LAYOUT_VARIABLE, "").upper().startswith("B"),
        promotes_windows=bool(model.arguments.disable_hybrid_kv_cache_manager) or (has_chunks and not allows_chunks),
    )


def _layer_count(model_config: Mapping[str, object], specs: Sequence[LayerSpec]) -> int:
    facts = ModelFacts.of(model_config)
    kinds = facts.texts("layers_block_type")
    names = ("num_hidden_layers", "n_layers", "n_layer")
    return facts.numbers(*names, default=len(kinds) if kinds else specs[-1].layer + 1)


def _stages(layer_count: int, stage_count: int, partition: str | None) -> list[range]:
    """Return the layers of each pipeline stage. Surplus layers go to the stages before the last, from the back.

    `partition` is the value of VLLM_PP_LAYER_PARTITION, as in `10,12,10`.
    """
    counts = [layer_count // stage_count] * stage_count
    for back in range(2, layer_count % stage_count + 2):
        counts[-back] += 1
    if partition is not None:
        counts = [int(part) for part in partition.split(",") if part.strip().isdecimal()]
        if len(counts) != stage_count or sum(counts) != layer_count:
            raise SizeUnknown(f"`{STAGES_VARIABLE}={partition}` does not fit {layer_count} layers")
    ends = [sum(counts[: stage + 1]) for stage in range(stage_count)]
    return [range(end - size, end) for end, size in zip(ends, counts, strict=True)]


def _block_count(model: Model, block_bytes: int) -> tuple[int | None, str | None]:
    """Return the blocks of G1, null block included, and what sets them; None if they depend on free memory."""
    arguments, setting, prefix = model.arguments, model.setting, "engine.arguments."
    if arguments.num_gpu_blocks_override is not None:
        return arguments.num_gpu_blocks_override, f"{prefix}num_gpu_blocks_override"
    space = setting.variables.get(CPU_SPACE_VARIABLE, "")
    if setting.on_cpu and space.isascii() and space.isdigit() and int(space):
        return int(space) * 2**30 // block_bytes, CPU_SPACE_VARIABLE
    memory_bytes = count_of(arguments.kv_cache_memory_bytes)
    if memory_bytes is not None:
        return memory_bytes // block_bytes, f"{prefix}kv_cache_memory_bytes"
    return None, None


def _snapshot_notes(arguments: VllmArguments, plan: VllmPlan, length: int) -> Iterator[str]:
    if 0 < length <= plan.block_tokens:
        yield f"a sequence of at most one block ({plan.block_tokens:,} tokens) has no snapshot and is never cached"
    if arguments.prefix_cache_retention_interval:
        yield f"sizes assume one snapshot per sequence; `{RETENTION}` stores more"


def _in_flight(arguments: VllmArguments) -> int:
    ranks = (arguments.tensor_parallel_size or 1) * (arguments.pipeline_parallel_size or 1)
    return count_of(arguments.max_num_batched_tokens) or _BATCHED_TOKENS * ranks


def _token_count(
    groups: Sequence[CacheGroup], block_count: int | None, longest: int | None, in_flight: int
) -> int | None:
    """Tokens that G1 holds in requests of maximum length, as vLLM logs them. None if it is blocks times tokens."""
    if block_count is None or longest is None or len(groups) == 1:
        return None
    return int(block_count / sum(group.blocks(longest, in_flight=in_flight) for group in groups) * longest)
