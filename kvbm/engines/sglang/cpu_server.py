"""SGLang's server on a CPU, with its kernels replaced by plain torch: for tests and the profile `sglang-cpu-demo`.

    python -m kvbm.engines.sglang.cpu_server --model-path M --device cpu --attention-backend torch_native ...

SGLang has no released build for CPUs, but everything except its kernels runs there: scheduler, radix tree, hierarchical
cache, storage threads, HTTP server. This module stands in for those kernels that a dense model needs, and starts the
server. It changes nothing of SGLang on disk. Times that are measured with it say nothing about SGLang.

    package `sgl_kernel`        table entries of a request; any other kernel raises its name when it is called
    host pools                  copies between device and host memory: the io backend `direct`
    page-locking                left out
    reserve of host memory      1 GiB instead of 10 GiB
    operators of torchvision    declared, if the installed build of torchvision does not load

SGLang starts its processes by `spawn`, which imports this module in each of them first.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from kvbm.engines.sglang.launch import CPU_RESERVE_BYTES, STAND_INS_VARIABLE

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    import torch

POOLS = "sglang.srt.mem_cache.pool_host"
_TORCHVISION = (
    *("nms(Tensor a, Tensor b, float c) -> Tensor", "qnms(Tensor a, Tensor b, float c) -> Tensor"),
    *(
        f"{name}(Tensor a) -> Tensor"
        for pool in ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d", "qroi_align")
        for name in (pool, f"_{pool}_backward")
    ),
)


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    locations: torch.Tensor,
    *_: Any,
) -> None:
    """Write the new token locations of each request into its row."""
    at = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = locations[at : at + end - start].to(table.dtype)
        at += end - start


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens, layer by layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of pages (pages first) to tokens (layers first)."""
    pages = src_indices.long()[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        rows = source[pages, layer_id]
        target[dst_indices.long()] = rows.reshape(len(dst_indices), *rows.shape[2:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy all layers of tokens (layers first: those of K, then those of V) to pages (pages first)."""
    pages, layers = dst_indices.long()[::page_size] // page_size, len(src_ptrs) // len(dst_ptrs)
    for index, source in enumerate(src_ptrs):
        target, layer = dst_ptrs[index // layers], index % layers
        rows = source[src_indices.long()]
        target[pages, layer] = rows.reshape(len(pages), page_size, *rows.shape[1:])


COPIES = (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf)


def prepare() -> None:
    """Let SGLang find what stands in for its kernels, when it is imported."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = os.environ[STAND_INS_VARIABLE] = "1"
    _declare_torchvision()
    kernels = _Kernels("sgl_kernel")
    kernels.__spec__ = importlib.util.spec_from_loader("sgl_kernel", None)
    kernels.__path__ = []
    vars(kernels)["assign_req_to_token_pool_cpu"] = assign_req_to_token_pool_cpu
    sys.modules["sgl_kernel"] = kernels
    patches = {"common": _patch_common, "base": _patch_base, "mha": _patch_copies, "mla": _patch_copies}
    sys.meta_path.insert(0, _Patches({f"{POOLS}.{name}": patch for name, patch in patches.items()}))


class _Kernels(types.ModuleType):
    """The package `sgl_kernel`. A kernel that is not there can be imported, and raises when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"SGLang's kernel `{name}` has no stand-in on a CPU")

        return missing


class _Patches(importlib.abc.MetaPathFinder):
    """Changes modules right after they have been executed."""

    def __init__(self, patches: dict[str, Callable[[types.ModuleType], None]]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self._patches:
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is not None and found.loader is not None:
            original, patch = found.loader.exec_module, self._patches[name]

            def exec_module(module: types.ModuleType) -> None:
                original(module)
                patch(module)

            found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def _patch_common(module: types.ModuleType) -> None:
    vars(module)["_cuda_host_register"] = lambda *_: None
    vars(module)["_cuda_host_unregister"] = lambda *_: None


def _patch_base(module: types.ModuleType) -> None:
    vars(module)["HICACHE_HOST_MEMORY_RESERVE_BYTES"] = CPU_RESERVE_BYTES
    allocate = module.HostKVCache.__init__

    @functools.wraps(allocate)
    def __init__(self: Any, *arguments: Any, **keys: Any) -> None:
        allocate(self, *arguments, **{**keys, "pin_memory": False})  # torch cannot, and flat pages ask for it

    module.HostKVCache.__init__ = __init__


def _patch_copies(module: types.ModuleType) -> None:
    vars(module).update({copy.__name__: copy for copy in COPIES})


def _declare_torchvision() -> None:
    """Declare the operators of torchvision unless it has them: a build for CUDA loads no library on a CPU."""
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [one for one in sys.modules if one.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for schema in _TORCHVISION:
            library.define(schema)
        vars(sys.modules[__name__])["_library"] = library  # the operators live as long as it does
    except ImportError:
        pass  # not installed


def main(arguments: Sequence[str]) -> None:
    server = importlib.import_module("sglang.launch_server")
    try:
        server.run_server(importlib.import_module("sglang.srt.server_args").prepare_server_args(list(arguments)))
    finally:
        importlib.import_module("sglang.srt.utils").kill_process_tree(os.getpid(), include_parent=False)


prepare()
if __name__ == "__main__":
    main(sys.argv[1:])
