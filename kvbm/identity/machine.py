"""What of a machine changes the bytes that an engine computes: instructions of the processor, a few variables, and
versions of installed packages."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

CPU_FACTS = Path("/proc/cpuinfo")
VENDORS = frozenset({"vendor_id", "CPU implementer", "CPU part"})  # libraries choose kernels by vendor
FLAGS = frozenset({"flags", "Features"})
KERNEL_FLAGS = frozenset(  # for which torch, oneDNN and vLLM have kernels of their own
    {"avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"}
    | {"amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2"}
)
PRECISION_VARIABLES = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
)


def cpu_features() -> str:
    """Return vendor and instructions of the processor, empty if the system does not tell them."""
    facts = _cpu_facts()
    vendor = [text for name in sorted(VENDORS & set(facts)) for text in facts[name]]
    return " ".join([*vendor, *sorted(cpu_flags() & KERNEL_FLAGS)])


def cpu_flags() -> frozenset[str]:
    """Return the flags of the first processor, empty if they are unknown."""
    facts = _cpu_facts()
    return frozenset(flag for name in FLAGS & set(facts) for flag in facts[name])


def _cpu_facts() -> dict[str, list[str]]:
    """Return the facts of the first processor, empty without `/proc`."""
    try:
        lines = CPU_FACTS.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.split() for name, _, value in (line.partition(":") for line in lines)}


def precision_variables() -> dict[str, str]:
    """Return the environment variables that make libraries compute with another precision or other kernels."""
    return {name: os.environ[name] for name in PRECISION_VARIABLES if name in os.environ}


RELEASE = re.compile(r"(\d+\.\d+)(?:\.\d+)*(?:\.post\d+)?(\+.*)?")


def version_of(distribution: str) -> str:
    """Return the installed version, empty if the distribution is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def release_of(version: str) -> str:
    """Return what of a version counts: major and minor of a release, with its local label, such as `2.12+cpu`.

    A pre-release or development version counts completely: two of them may compute differently.
    """
    found = RELEASE.fullmatch(version)
    return version if found is None else found[1] + (found[2] or "")
