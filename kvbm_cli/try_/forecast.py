"""The sizes and the requests of a trial, and how long it takes, from the model and from what this machine has.

    seconds of a start    as in the plan of a benchmark, longer on a busy machine, and a read of the weights
    tokens per second     of prompts: operations per second / (2 x active parameters); of answers: reads of the weights
    seconds of a run      as in the plan of a benchmark, with these speeds

The operations per second of a CPU are measured, those of a GPU follow from its compute capability; ATTAINED is the
share that engines attain. The benchmark itself measures the interval between two requests, so a wrong forecast changes
the duration of the trial, and not its load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbm.config.sizes import format_size
from kvbm.engines.model_facts import weight_bytes
from kvbm.engines.table import kind_of
from kvbm.errors import EnvironmentProblem, ProfileError
from kvbm.host.machine_memory import THIS_MACHINE, margin_of
from kvbm.sizing import SizeUnknown, Sizing, Wanted
from kvbm.sizing.families.facts import text_facts
from kvbm.sizing.gpu import DEFAULT_UTILIZATION, MemoryEstimate
from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.engines import HEADROOM
from kvbm_cli.bench.setup import ON_CPU, ON_GPU, AssumedSpeed, CellOutline
from kvbm_cli.bench.workload.schema import Conversations, Schedule
from kvbm_cli.profile.size import size_of
from kvbm_cli.system.machine import load_average, usable_cpu_count
from kvbm_cli.terminal.quantities import duration

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import Profile
    from kvbm_cli.try_.gpus import GpuState

READ_BYTES_PER_S, CPU_MEMORY_BYTES_PER_S, GPU_MEMORY_BYTES_PER_S = 1e9, 1e10, 1e12
PREPARATION_S, TIMEOUT_S = 10.0, 300.0
MOST_BUSY = 10.0  # how much longer a start takes at most because of other load
ATTAINED = 0.4
PEAKS = {80: 312e12, 86: 75e12, 89: 180e12, 90: 990e12, 100: 2250e12, 103: 2500e12}  # bfloat16, by capability
OTHER_PEAK = 100e12
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # names of their number in configurations
PRESSURE, LEAST_PRESSURE = 1.5, 0.01  # working set over G1
ARMS, MOST_PAIRS, TURNS, USERS = 2, 3, 3, 8  # the arms are baseline and kvbm
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 128, 48, 16
LEAST_HISTORY, USUAL_HISTORY, MOST_HISTORY, LONGEST = 256, 2000, 4000, 8192
LIGHT_START_S = 5.0  # of the embedded engine
LEAST_G1_TOKENS = 16_384  # on a CPU, where G1 takes host memory
LEAST_BLOCKS, LEAST_SHARE = 64, 0.25  # of host memory; of the minutes, for requests
PROCESS_BYTES = 1 << 30  # of an engine, next to its weights and G1
MIB, MATRIX = 1 << 20, 768


def speed_of(profile: Profile, gpus: Sequence[GpuState]) -> AssumedSpeed:
    """Return what the engine of a profile attains, by its model and by this machine."""
    weights, facts = weights_of(profile), _facts(profile)
    experts = next((facts[one] for one in EXPERTS if one in facts), 1)
    active = weights * facts.get("num_experts_per_tok", experts) / experts  # 2 bytes and 2 operations per parameter
    if gpus:
        start_s, memory_rate = ON_GPU.start_s, len(gpus) * GPU_MEMORY_BYTES_PER_S
        rate = len(gpus) * PEAKS.get(gpus[0].capability, OTHER_PEAK)
    else:
        start_s = LIGHT_START_S if profile.engine.kind == "embedded" else ON_CPU.start_s
        rate, memory_rate = _cpu_rate(), CPU_MEMORY_BYTES_PER_S
    busy = min(MOST_BUSY, max(1.0, (load_average() or 0.0) / usable_cpu_count()))
    return AssumedSpeed(busy * start_s + weights / READ_BYTES_PER_S, ATTAINED * rate / active, memory_rate / active)


def total_s(speed: AssumedSpeed, starts: int, runs_s: float) -> float:
    """Return the seconds of a trial with so many starts of engines."""
    return starts * speed.start_s + runs_s + PREPARATION_S


@dataclass(frozen=True, slots=True)
class Forecast:
    """`pressure` is None if the size of G1 is unknown. `note` says what the time does not allow."""

    workload: Conversations
    pairs: int
    pressure: float | None
    note: str | None = None


def forecast(speed: AssumedSpeed, sizing: Sizing | None, *, in_turn: bool, minutes: float) -> Forecast:
    """Choose conversations with a working set of PRESSURE times G1, or of as much as the minutes allow."""
    g1_tokens = 0 if sizing is None or sizing.device is None else sizing.device.token_count
    longest = (sizing.sequence_tokens if sizing is not None else 0) or LONGEST
    workload = _conversations(longest, PRESSURE * g1_tokens, in_turn=in_turn)
    run_s = CellOutline.of(Cell(workload.name, workload), speed).duration_s
    pairs = MOST_PAIRS if in_turn else 1
    while True:
        starts, groups = (1 + ARMS * pairs, ARMS * pairs) if in_turn else (1 + ARMS, 1)  # one prepares
        if total_s(speed, starts, groups * run_s) <= 60 * minutes:
            return Forecast(workload, pairs, PRESSURE if g1_tokens else None)
        if pairs == 1:
            break
        pairs -= 1
    fixed_s, enough = total_s(speed, starts, 0), math.ceil(total_s(speed, starts, groups * run_s) / 60)
    pressure = PRESSURE * max(60 * minutes - fixed_s, LEAST_SHARE * 60 * minutes) / (groups * run_s)
    note = (
        f"{minutes:g} minutes allow a working set of {pressure:.2g} times G1; `--minutes {enough}` allows "
        f"{PRESSURE:g} times G1, so that blocks are evicted; the {starts} engine starts take about {duration(fixed_s)}"
    )
    pressure = max(LEAST_PRESSURE, math.floor(100 * pressure) / 100)
    workload = _conversations(longest, pressure * g1_tokens, in_turn=in_turn)
    return Forecast(workload, 1, pressure if g1_tokens else None, note)


def _conversations(longest: int, working_set: float, *, in_turn: bool) -> Conversations:
    most = min(MOST_HISTORY, longest - SYSTEM_TOKENS - TURNS * (QUESTION_TOKENS + ANSWER_TOKENS))
    found = Conversations(
        name="try",
        users=USERS,
        turns=TURNS,
        system_tokens=SYSTEM_TOKENS,
        history_tokens=max(1, min(most, max(LEAST_HISTORY, round(working_set / USERS) or USUAL_HISTORY))),
        question_tokens=QUESTION_TOKENS,
        answer_tokens=ANSWER_TOKENS,
        history="canned",
        schedule=Schedule(target_utilisation=0.5) if in_turn else Schedule(arms="interleaved", target_utilisation=0.4),
        request_timeout_s=TIMEOUT_S,
    )
    return found.scaled(round(working_set)) if working_set else found


def with_device_size(sizing: Sizing) -> tuple[str, ...]:
    """Return overrides that set G1 of vLLM on a CPU, which otherwise takes most of the machine's memory."""
    blocks = sizing.group_count * (math.ceil(max(sizing.sequence_tokens, LEAST_G1_TOKENS) / sizing.block_tokens) + 2)
    size = f"engine.arguments.kv_cache_memory_bytes={(blocks + 1) * sizing.block_bytes}"
    return f"engine.arguments.num_gpu_blocks_override={blocks}", size


def sizes(resolved: ResolvedProfile, gpus: Sequence[GpuState]) -> Sizing | None:
    """Return the sizes, with an estimate of G1 on a GPU; None if only the engine knows them."""
    wanted = Wanted()
    if gpus:
        given = getattr(resolved.profile.engine.arguments, "gpu_memory_utilization", None) or DEFAULT_UTILIZATION
        memory = MemoryEstimate(gpus[0].memory_bytes, weights_of(resolved.profile), float(given))
        wanted = Wanted(memory=memory, capability=gpus[0].capability)
    try:
        return size_of(resolved, wanted)
    except SizeUnknown:
        return None


def spare_bytes(profile: Profile, sizing: Sizing | None, *, engine_count: int) -> int:
    """Return the host memory that so many engines on the CPU leave for blocks; may be negative."""
    available, device = THIS_MACHINE.room().available_bytes, None if sizing is None else sizing.device
    used = engine_count * (weights_of(profile) + PROCESS_BYTES + (0 if device is None else device.total_bytes))
    return available - used - margin_of(available)


def wanted_bytes(sizing: Sizing | None, spare: int) -> int:
    """Return the host memory that holds the working set, half of the spare one if its size is unknown."""
    if sizing is None or sizing.device is None:
        return spare // 2
    return math.ceil(HEADROOM * PRESSURE * sizing.device.block_count) * sizing.stored_bytes


def host_capacity(sizing: Sizing | None, spare: int) -> str:
    """Return the capacity of host memory for the profile. EnvironmentProblem if too little is spare."""
    least = LEAST_BLOCKS * sizing.stored_bytes if sizing is not None else MIB
    if spare < least:
        room = THIS_MACHINE.room()
        raise EnvironmentProblem(
            f"too little host memory: {format_size(room.available_bytes)} are free ({room.limit}), and an engine with "
            f"{format_size(least)} for blocks needs {format_size(room.available_bytes + least - spare)}",
            hint="stop other programs, or use a smaller model",
        )
    return f"{max(1, min(spare, wanted_bytes(sizing, spare)) // MIB)}MiB"


def weights_of(profile: Profile) -> int:
    """Return the bytes of the weights, estimated from the layers if they are not on this machine."""
    facts = _facts(profile)
    layers, hidden = facts.get("num_hidden_layers", 32), facts.get("hidden_size", 4096)
    return weight_bytes(profile.engine.model) or 24 * layers * hidden * hidden


def _facts(profile: Profile) -> dict[str, Any]:
    """Return the whole numbers above 0 of the model's configuration; none of a model that is not on this machine."""
    try:
        facts = text_facts(kind_of(profile).model_facts(profile.engine.model))
    except (ProfileError, SizeUnknown):
        return {}
    return {name: value for name, value in facts.items() if isinstance(value, int) and value > 0}


def _cpu_rate() -> float:
    """Measure the operations per second of a product of matrices in 32 bits."""
    import numpy as np

    matrix, times = np.ones((MATRIX, MATRIX), np.float32), []
    for _ in range(4):  # the first one starts threads
        started = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - started)
    return 2 * MATRIX**3 / min(times)
