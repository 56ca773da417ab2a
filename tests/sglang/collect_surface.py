"""Reads what kvbm's storage uses of SGLang out of a wheel, without installing or importing it.

    python tests/sglang/collect_surface.py sglang-0.5.23-*.whl ...

adds each version to `surfaces.json`, or replaces it. `test_sglang_contract.py` holds kvbm against every version there.
A surface has for each class its attributes, and its methods with their parameters; single functions that kvbm wraps or
calls; and how the factory of storage backends constructs one.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

FILE = Path(__file__).parent / "surfaces.json"
CLASSES = {
    "sglang/srt/mem_cache/hicache_storage.py": (
        *("HiCacheStorage", "HiCacheStorageConfig", "HiCacheStorageExtraInfo"),
        *("PoolName", "PoolTransfer", "PoolHitPolicy", "PoolTransferResult"),
    ),
    "sglang/srt/mem_cache/pool_host/base.py": ("HostKVCache",),
    "sglang/srt/mem_cache/pool_host/mha.py": ("MHATokenToKVPoolHost",),
    "sglang/srt/model_executor/model_runner_components/weight_updater.py": ("WeightUpdater",),
    "sglang/srt/managers/scheduler.py": ("Scheduler",),
}
FUNCTIONS = {  # also methods
    "sglang/srt/managers/cache_controller.py": ("_stop_storage_threads",),
    "sglang/srt/managers/scheduler_components/weight_updater.py": ("_export_static_state",),
    "sglang/srt/mem_cache/buffer_mode/pipeline.py": ("release_staged_hold",),
    "sglang/srt/mem_cache/cpp_utils/native_hash.py": ("get_native_hash",),
    "sglang/srt/mem_cache/unified_radix_cache.py": (
        *("check_prefetch_progress", "_handle_prefetch_result", "release_aborted_request"),
    ),
    "sglang/srt/utils/weight_checker.py": ("_reset_tensors",),
}
FACTORY = "sglang/srt/mem_cache/storage/backend_factory.py"


def collect(wheel: zipfile.ZipFile) -> dict[str, object]:
    names = set(wheel.namelist())
    found = {}
    for path, wanted in CLASSES.items():
        nodes = ast.parse(wheel.read(path)).body if path in names else []
        found |= {node.name: _class(node) for node in nodes if isinstance(node, ast.ClassDef) and node.name in wanted}
    factory = ast.parse(wheel.read(FACTORY)) if FACTORY in names else ast.Module([], [])
    constructs = [
        [*map(ast.unparse, node.args), *(f"{one.arg}=" for one in node.keywords)]
        for node in ast.walk(factory)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "backend_class"
    ]
    functions = {
        node.name: ast.unparse(node.args)
        for path, wanted in FUNCTIONS.items()
        if path in names
        for node in ast.walk(ast.parse(wheel.read(path)))
        if isinstance(node, ast.FunctionDef) and node.name in wanted
    }
    return {"classes": found, "constructs": sorted(constructs), "functions": functions}


def _class(node: ast.ClassDef) -> dict[str, object]:
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    fields = [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    own = {
        target.attr
        for function in functions
        for one in ast.walk(function)
        for target in (
            one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        )
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    values = [
        one.targets[0].id for one in node.body if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
    ]
    decorated = {one.name: {ast.unparse(name) for name in one.decorator_list} for one in functions}
    return {
        "attributes": sorted(
            {*fields, *own, *values, *(name for name, marks in decorated.items() if "property" in marks)}
        ),
        "methods": {one.name: ast.unparse(one.args) for one in functions if "property" not in decorated[one.name]},
        "abstract": sorted(name for name, marks in decorated.items() if "abstractmethod" in marks),
    }


def main(paths: list[str]) -> None:
    surfaces = json.loads(FILE.read_text()) if FILE.exists() else {}
    for path in paths:
        version = Path(path).name.split("-")[1]
        surfaces[version] = collect(zipfile.ZipFile(path))
        print(version)
    FILE.write_text(json.dumps(surfaces, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
