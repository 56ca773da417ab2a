"""Model loading, and the forward pass over a packed row.

A model is `synthetic:NAME` (random weights, deterministic in the seed) or a local Hugging Face directory of a supported
architecture with full or sliding-window attention. Unsupported models are rejected with the reason, before weights are
read where possible. A probe measures the shapes of K and V; they are not derived from the configuration.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from kvbm import hashing
from kvbm.engines.embedded.engine import attention, tokenizer
from kvbm.engines.embedded.engine.attention import Batch, PackedSequence
from kvbm.engines.embedded.engine.kv_pool import TORCH_DTYPES, KVGeometry, KVPool
from kvbm.engines.embedded.engine.supported_models import supported_facts
from kvbm.engines.model_facts import SYNTHETIC_PREFIX
from kvbm.errors import EnvironmentProblem, InvariantError
from kvbm.host.threads import allowed_cores
from kvbm.identity.description import settled
from kvbm.identity.digests import Unidentified
from kvbm.identity.machine import cpu_features, precision_variables, release_of
from kvbm.identity.options import Options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from kvbm.engines.embedded.engine.config import EngineConfig

# These rope types change the angles of all tokens once a sequence is longer than the original context.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
PROBE_NAME = "kvbm_probe"
ONE_THREAD_PARAMETERS = 50_000_000
DIGEST_THREADS = 4
GEOMETRY_VERSION = 3


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that uses paged attention. `identity` is everything that determines the bytes of a block, `namespace` its
    digest. `doubt` says why they may not describe the weights, empty if they do.
    """

    network: torch.nn.Module
    geometry: KVGeometry
    tokenizer: PreTrainedTokenizerBase | None
    vocabulary_size: int
    max_positions: int
    stop_token_ids: frozenset[int]
    parameter_count: int
    device: str
    identity: Mapping[str, object]
    namespace: bytes
    doubt: str

    def forward(self, batch: Batch, token_ids: list[int], positions: list[int], logit_rows: list[int]) -> torch.Tensor:
        """Run the packed row; returns float32 logits [len(logit_rows), vocabulary]."""
        with attention.current(batch):
            output = self.network(
                input_ids=torch.tensor([token_ids], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                logits_to_keep=torch.tensor(logit_rows, device=self.device),
            )
        return output.logits[0].float()


def load(config: EngineConfig) -> LoadedModel:
    """Load, probe and verify the model of `config`. Raises ProfileError or EnvironmentProblem."""
    device = _device(config.device)
    if config.model.startswith(SYNTHETIC_PREFIX):
        source = _synthetic(config, device)
    else:
        source = _directory(config, device)
    network = source.network
    attention.register()
    geometry = _probe(network, config.dtype, device)
    network.set_attn_implementation(attention.ATTENTION_NAME)
    configuration, doubt = _configuration(network.config, source)
    identity = _identity(config, configuration, source.weights, device)
    model = LoadedModel(
        network=network,
        geometry=geometry,
        tokenizer=source.tokenizer,
        vocabulary_size=network.get_input_embeddings().num_embeddings,
        max_positions=_max_positions(network.config),
        stop_token_ids=_stop_token_ids(network),
        parameter_count=sum(parameter.numel() for parameter in network.parameters()),
        device=device,
        identity=identity,
        namespace=hashing.namespace(identity),
        doubt=doubt,
    )
    if config.verify:
        _verify(model, config)
    return model


@dataclass(frozen=True, slots=True)
class _Source:
    """A network, its tokenizer, and values that identify its weights."""

    network: torch.nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    weights: object
    directory: Path | None = None


def _device(requested: str) -> str:
    if requested == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem("no CUDA device is available", hint="use `--device cpu`")
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return requested


def _synthetic(config: EngineConfig, device: str) -> _Source:
    from transformers import AutoConfig, AutoModelForCausalLM

    name = config.model.removeprefix(SYNTHETIC_PREFIX)
    hf_config = AutoConfig.for_model(**supported_facts(config.model))
    with torch.random.fork_rng(devices=[device] if device != "cpu" else []), torch.device(device):
        torch.manual_seed(config.seed)
        network = AutoModelForCausalLM.from_config(hf_config, dtype=TORCH_DTYPES[config.dtype])
    weights = {"synthetic": name, "seed": config.seed, "tensors": _tensor_digest(network)}
    return _Source(network.eval(), tokenizer.byte_tokenizer(), weights)


def _directory(config: EngineConfig, device: str) -> _Source:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    directory = Path(config.model).expanduser()
    supported_facts(config.model)
    logging.disable_progress_bar()
    try:
        hf_config = AutoConfig.from_pretrained(directory, local_files_only=True)
        network, report = AutoModelForCausalLM.from_pretrained(
            directory,
            config=hf_config,
            dtype=TORCH_DTYPES[config.dtype],
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise EnvironmentProblem(f"the model in `{directory}` cannot be loaded: {error}") from error
    absent = sorted(str(key) for key in [*report["missing_keys"], *report["mismatched_keys"]])
    if absent:
        raise EnvironmentProblem(
            f"`{directory}` has no usable weights for {', '.join(absent[:5])} ({len(absent)} in total)"
        )
    network = network.eval()
    _detach(network)
    tensors = _tensor_digest(network)
    network = network.to(device)
    return _Source(network, tokenizer.directory_tokenizer(directory), {"tensors": tensors}, directory)


def _detach(network: torch.nn.Module) -> None:
    """Copy the weights into memory of this process: on a CPU they are mapped from the file, and change with it."""
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def _tensor_digest(network: torch.nn.Module) -> str:
    """Return a digest of all bytes of the weights in memory. Requires `_detach`.

    Whatever happened to the files before, during or after loading, it identifies what computes the blocks.
    """

    def digest(named: tuple[str, torch.Tensor]) -> bytes:
        name, tensor = named
        hasher = xxhash.xxh3_128(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        hasher.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        return hasher.digest()

    with ThreadPoolExecutor(max(1, min(DIGEST_THREADS, len(allowed_cores())))) as threads:
        digests = threads.map(digest, (*network.named_parameters(), *network.named_buffers()))
        return xxhash.xxh3_128_hexdigest(b"".join(digests))


def _max_positions(hf_config: PreTrainedConfig) -> int:
    """Return the longest sequence whose KV does not depend on its final length."""
    limit = int(hf_config.max_position_embeddings)
    rope = getattr(hf_config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        original = rope.get("original_max_position_embeddings")
        original = original or getattr(hf_config, "original_max_position_embeddings", None) or limit
        limit = min(limit, int(original))
    return limit


def _stop_token_ids(network: torch.nn.Module) -> frozenset[int]:
    for holder in (getattr(network, "generation_config", None), network.config):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def _probe(network: torch.nn.Module, dtype: str, device: str) -> KVGeometry:
    """Run two tokens and record the shapes of K and V that every layer passes to its attention function."""
    from transformers import AttentionInterface

    seen: dict[int, tuple[int, int, int]] = {}

    def look(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, None]:
        seen[int(module.layer_idx)] = (key.shape[1], key.shape[-1], value.shape[-1])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(PROBE_NAME, look)
    network.set_attn_implementation(PROBE_NAME)
    with torch.inference_mode():
        network(input_ids=torch.tensor([[0, 1]], device=device), use_cache=False)
    shapes = set(seen.values())
    if len(shapes) != 1 or sorted(seen) != list(range(network.config.num_hidden_layers)):
        raise EnvironmentProblem(f"the model's layers have different KV shapes: {seen}")
    kv_heads, key_dim, value_dim = shapes.pop()
    return KVGeometry(len(seen), kv_heads, key_dim, value_dim, dtype)


def _configuration(hf_config: PreTrainedConfig, source: _Source) -> tuple[str, str]:
    """Return a digest of the configuration of a model, and why it may be another one, empty if it is not."""
    try:
        return str(settled(Options(source.directory).digest(hf_config))), ""
    except (Unidentified, OSError) as error:
        return "", f"the configuration of the model cannot be identified: {error}"


def _identity(config: EngineConfig, configuration: str, weights: object, device: str) -> dict[str, object]:
    """Return everything that determines the bytes and the hashes of a block."""
    import transformers

    if device == "cpu":
        isa = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {cpu_features()}"
    else:
        isa = torch.cuda.get_device_name(device)
    return {
        "engine": "embedded",
        "geometry_version": GEOMETRY_VERSION,
        "versions": [release_of(str(torch.__version__)), release_of(str(transformers.__version__))],
        "configuration": configuration,
        "weights": weights,
        "dtype": config.dtype,
        "block_size": config.block_size,
        "kv_layout": config.kv_layout,
        "instruction_set": isa,
        "precision": precision_variables(),
        "hash": f"blake2b-{hashing.HASH_BYTES}",
    }


VERIFY_TOKENS = 40
VERIFY_CHUNKS = (24, 12, 1, 1, 1, 1)
VERIFY_LEAST_SIMILARITY = {"float32": 0.9999, "bfloat16": 0.9, "float16": 0.95}


def _verify(model: LoadedModel, config: EngineConfig) -> None:
    """Compare the last four logits of 40 tokens, run in chunks through a pool, with the model's own attention."""
    token_ids = [(7 + 13 * index) % model.vocabulary_size for index in range(VERIFY_TOKENS)]
    with torch.inference_mode():
        model.network.set_attn_implementation("eager")
        own = model.network(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits[0, -4:]
        model.network.set_attn_implementation(attention.ATTENTION_NAME)
        ours = _chunked_logits(model, config, token_ids)[-4:]
    similarity = torch.nn.functional.cosine_similarity(own.float(), ours, dim=-1).min().item()
    if not similarity >= VERIFY_LEAST_SIMILARITY[config.dtype]:
        raise EnvironmentProblem(
            f"paged attention gives `{config.model}` other logits than its own attention: similarity {similarity:.6f}",
            hint="install a supported version of transformers: `pip install 'kvbm-cli[embedded]'`",
        )


def _chunked_logits(model: LoadedModel, config: EngineConfig, token_ids: list[int]) -> torch.Tensor:
    size = config.block_size
    block_ids = list(range(-(-len(token_ids) // size)))[::-1]
    pool = KVPool(
        model.geometry, block_count=len(block_ids), block_size=size, kv_layout=config.kv_layout, device=model.device
    )
    rows: list[torch.Tensor] = []
    done = 0
    for count in VERIFY_CHUNKS:
        batch = Batch(pool, [PackedSequence(0, count, done + count, block_ids)])
        chunk = token_ids[done : done + count]
        rows.append(model.forward(batch, chunk, list(range(done, done + count)), [count - 1]))
        done += count
    if done != len(token_ids):
        raise InvariantError(f"verified {done} tokens of {len(token_ids)}")
    return torch.cat(rows)
