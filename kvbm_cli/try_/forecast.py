"""The sizes and the requests of a trial, and how long it takes, from the model and from what this machine has.

    seconds of a start    as in the plan of a benchmark, longer on a busy machine, and a read of the weights
    tokens per second     of prompts: operations per second / (2 x active parameters + attention); of answers: reads of
                          the weights, at most as in the plan of a benchmark
    seconds of a run      as in the plan of a benchmark, with these speeds

The operations per second of a CPU are measured, those of a GPU follow from its compute capability; an engine attains a
share of them. The benchmark itself measures the interval between two requests, so a wrong forecast changes the duration
of the trial, and not its load.

Engines run one after the other, so that each has the memory of the machine, as when it serves. Two requests of each
conversation are enough: other users' requests come between them, so if the working set exceeds G1, the engine alone
computes the second prompt from its beginning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbm.config.values import count_of
from kvbm.engines.model_facts import weight_bytes
from kvbm.engines.table import kind_of
from kvbm.errors import ProfileError
from kvbm.sizing import SizeUnknown, Sizing, Wanted
from kvbm.sizing.families.facts import text_facts
from kvbm.sizing.gpu import DEFAULT_UTILIZATION, MemoryEstimate
from kvbm_cli.bench.cells import AUTO, AUTO_PRESSURE, Cell
from kvbm_cli.bench.setup import ASSUMED_G1_TOKENS, ON_CPU, ON_GPU, AssumedSpeed, CellOutline
from kvbm_cli.bench.workload.schema import Conversations, Schedule
from kvbm_cli.profile.size import size_of
from kvbm_cli.system.machine import load_average, usable_cpu_count
from kvbm_cli.terminal.quantities import duration

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import Profile
    from kvbm_cli.try_.gpus import GpuState

READ_BYTES_PER_S, CPU_MEMORY_BYTES_PER_S, GPU_MEMORY_BYTES_PER_S = 1e9, 1e10, 1e12
PREPARATION_S, TIMEOUT_S = 20.0, 300.0
MOST_BUSY = 10.0  # how much longer a start takes at most because of other load
ATTAINED_ON_CPU, ATTAINED_ON_GPU = 0.5, 0.4
PEAKS = {80: 312e12, 86: 75e12, 89: 180e12, 90: 990e12, 100: 2250e12, 103: 2500e12}  # bfloat16, by capability
OTHER_PEAK = 100e12
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")  # names of their number in configurations
LEAST_PRESSURE, SMALLEST_PRESSURE = 1.2, 0.01  # working set over G1: so that prefixes are evicted; that a plan may have
ARMS, MOST_PAIRS, TURNS, USERS = 2, 3, 2, 8  # the arms are baseline and kvbm
USUAL_MINUTES, MOST_MINUTES = 8.0, 30.0  # without `--minutes`; for LEAST_PRESSURE
UTILISATION = 0.6  # of the baseline; above 0.7, a result has a caveat
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 128, 48, 16
LEAST_HISTORY, MOST_HISTORY, LONGEST = 256, 4000, 8192
LIGHT_START_S = 5.0  # of the embedded engine
LEAST_G1_TOKENS = 8_192  # on a CPU, where G1 takes host memory
LEAST_SHARE = 0.25  # of the minutes, for requests
MATRIX, PRODUCTS = 384, 60
LAYERS, HIDDEN = 32, 4096  # of a model that is not on this machine


def speed_of(profile: Profile, gpus: Sequence[GpuState], *, on_cpu: bool) -> AssumedSpeed:
    """Return what the engine of a profile attains, by its model and by this machine."""
    weights, facts = weights_of(profile), _facts(profile)
    experts = next((facts[one] for one in EXPERTS if one in facts), 1)
    active = weights * facts.get("num_experts_per_tok", experts) / experts  # 2 bytes and 2 operations per parameter
    operations = active + 4 * facts.get("num_hidden_layers", 0) * facts.get("hidden_size", 0) * MOST_HISTORY / 2
    if on_cpu:
        assumed, start_s = ON_CPU, LIGHT_START_S if profile.engine.kind == "embedded" else ON_CPU.start_s
        rate, memory_rate = ATTAINED_ON_CPU * _cpu_rate(), CPU_MEMORY_BYTES_PER_S
    else:
        assumed, start_s, count = ON_GPU, ON_GPU.start_s, len(gpus) or 1
        peak = PEAKS.get(gpus[0].capability, OTHER_PEAK) if gpus else OTHER_PEAK
        rate, memory_rate = ATTAINED_ON_GPU * count * peak, count * GPU_MEMORY_BYTES_PER_S
    answer_tokens = min(assumed.answer_tokens, memory_rate / active)
    busy = min(MOST_BUSY, max(1.0, ((load_average() or 0.0) + 1) / usable_cpu_count()))  # the engine is one more
    return AssumedSpeed(busy * start_s + weights / READ_BYTES_PER_S, rate / operations, answer_tokens)


def total_s(speed: AssumedSpeed, starts: int, runs_s: float) -> float:
    """Return the seconds of a trial with so many starts of engines."""
    return starts * speed.start_s + runs_s + PREPARATION_S


@dataclass(frozen=True, slots=True)
class Forecast:
    """`pressure` is an option of `kvbm bench`. `note` says what the time does not allow."""

    workload: Conversations
    pairs: int
    pressure: str
    note: str | None = None


def forecast(
    speed: AssumedSpeed, g1_tokens: int, longest: int, *, minutes: float | None, first_starts: int = 1
) -> Forecast:
    """Choose conversations with a working set of AUTO_PRESSURE times G1, or of as much as the minutes allow.

    `longest`: tokens of the longest sequence. `first_starts`: engines before those of the arms.
    """
    workload = _conversations(longest, AUTO_PRESSURE * g1_tokens)
    run_s = CellOutline.of(Cell(workload.name, workload), speed).duration_s / AUTO_PRESSURE  # with the tokens of G1
    usual_s, most_s = 60 * (minutes or USUAL_MINUTES), 60 * (minutes or MOST_MINUTES)

    def trial_s(pairs: int, pressure: float) -> float:
        return total_s(speed, first_starts + ARMS * pairs, ARMS * pairs * run_s * pressure)

    for pairs in range(MOST_PAIRS, 0, -1):
        if trial_s(pairs, AUTO_PRESSURE) <= usual_s:
            return Forecast(workload, pairs, AUTO)
    starts_s = trial_s(1, 0)
    usual, most = (max(one - starts_s, LEAST_SHARE * one) / (ARMS * run_s) for one in (usual_s, most_s))
    pressure = min(AUTO_PRESSURE, max(usual, min(most, LEAST_PRESSURE)))
    pressure = max(SMALLEST_PRESSURE, math.floor(100 * pressure) / 100)
    note = None
    if pressure < LEAST_PRESSURE:
        enough = math.ceil(trial_s(1, LEAST_PRESSURE) / 60)
        note = (
            f"too short to exceed G1: in {most_s / 60:g} min, the working set is {pressure:g} times G1, and kvbm may "
            f"have nothing to do; `--minutes {enough}` is enough (the engine starts alone take {duration(starts_s)})"
        )
    return Forecast(_conversations(longest, pressure * g1_tokens), 1, f"{AUTO}:{pressure:g}", note)


def _conversations(longest: int, working_set: float) -> Conversations:
    most = min(MOST_HISTORY, longest - SYSTEM_TOKENS - TURNS * (QUESTION_TOKENS + ANSWER_TOKENS))
    found = Conversations(
        name="try",
        users=USERS,
        turns=TURNS,
        system_tokens=SYSTEM_TOKENS,
        history_tokens=max(1, min(most, max(LEAST_HISTORY, round(working_set / USERS)))),
        question_tokens=QUESTION_TOKENS,
        answer_tokens=ANSWER_TOKENS,
        history="canned",
        schedule=Schedule(target_utilisation=UTILISATION),
        request_timeout_s=TIMEOUT_S,
    )
    return found.scaled(round(working_set))


def g1_and_longest(profile: Profile, sizing: Sizing | None) -> tuple[int, int]:
    """Return the tokens that G1 holds, assumed if they are not known, and those of the longest sequence."""
    device, of_model = (None, 0) if sizing is None else (sizing.device, sizing.sequence_tokens)
    arguments = profile.engine.arguments
    longest = count_of(getattr(arguments, arguments.LENGTH)) or of_model or LONGEST
    return ASSUMED_G1_TOKENS if device is None else device.token_count, longest


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


def weights_of(profile: Profile) -> int:
    """Return the bytes of the weights, estimated from the layers if they are not on this machine."""
    facts = _facts(profile)
    layers, hidden = facts.get("num_hidden_layers", LAYERS), facts.get("hidden_size", HIDDEN)
    return weight_bytes(profile.engine.model) or 24 * layers * hidden * hidden


def _facts(profile: Profile) -> dict[str, Any]:
    """Return the whole numbers above 0 of the model's configuration; none of a model that is not on this machine."""
    try:
        facts = text_facts(kind_of(profile).model_facts(profile.engine.model))
    except (ProfileError, SizeUnknown):
        return {}
    return {name: value for name, value in facts.items() if isinstance(value, int) and value > 0}


def _cpu_rate() -> float:
    """Measure the operations per second of a product of matrices in 32 bits. The best of many counts, because other
    load interrupts most of them."""
    import numpy as np

    matrix, times = np.ones((MATRIX, MATRIX), np.float32), []
    for _ in range(PRODUCTS):
        started = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - started)
    return 2 * MATRIX**3 / min(times)
