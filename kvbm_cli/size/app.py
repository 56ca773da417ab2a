"""`kvbm size`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvbm_cli.profile.options import DEFAULT, SIZED_ENGINES, OptionalProfilesOption, SetOption, StrictOption
from kvbm_cli.terminal.options import JsonOption, Text, argument, flag, matching, option, path_option

SIZED_HELP = "Directory or `config.json` of a model, or its name on Hugging Face."


def models(incomplete: str) -> list[str]:
    """Models of the catalogue."""
    from kvbm.sizing.catalogue import catalogue

    return matching(list(catalogue()), incomplete)


def size(
    model: Annotated[str | None, argument("MODEL", SIZED_HELP, models)] = None,
    profile: OptionalProfilesOption = None,
    set_: SetOption = None,
    engine: Annotated[Text, option("--engine", "ENGINE", f"{SIZED_ENGINES} {DEFAULT}.")] = None,
    tp: Annotated[Text, option("--tp", "N", "Tensor parallel ranks [default: 1].")] = None,
    pp: Annotated[Text, option("--pp", "N", "Pipeline parallel stages [default: 1].")] = None,
    kv_cache_dtype: Annotated[Text, option("--kv-cache-dtype", "TYPE", "Type of the KV cache, such as `fp8`.")] = None,
    block_size: Annotated[Text, option("--block-size", "TOKENS", "Tokens in a block [default: the engine's].")] = None,
    layout: Annotated[Text, option("--layout", "LAYOUT", "Memory layout of the blocks, such as `BLHNC`.")] = None,
    gpu: Annotated[Text, option("--gpu", "GPU", "Estimate G1 on a GPU such as `h100`.")] = None,
    gpu_memory: Annotated[Text, option("--gpu-memory", "SIZE", "Estimate G1 on a GPU with this memory.")] = None,
    weights: Annotated[Text, option("--weights", "SIZE", "Size of the weights [default: of the files].")] = None,
    host: Annotated[Text, option("--host", "SIZE", "Capacity of host memory (G2).")] = None,
    disk: Annotated[Text, option("--disk", "SIZE", "Capacity of the disk tier (G3).")] = None,
    length: Annotated[Text, option("--length", "TOKENS", "Length of a sequence [default: the maximum].")] = None,
    tokens: Annotated[Text, option("--tokens", "TOKENS", "Show the capacity for a sequence of this length.")] = None,
    users: Annotated[Text, option("--users", "N", "Show the capacity for this many conversations.")] = None,
    turns: Annotated[Text, option("--turns", "N", "Turns of each conversation.")] = None,
    turn_tokens: Annotated[Text, option("--turn-tokens", "TOKENS", "Tokens of each turn, with the answer.")] = None,
    doctor_: Annotated[Path | None, path_option("--doctor", "FILE", "Result of `kvbm doctor --json`.")] = None,
    list_: Annotated[bool, flag("--list", "List the models that require no download.")] = False,
    strict: StrictOption = False,
    json: JsonOption = False,
) -> int:
    """Show the blocks and tokens of each tier."""
    from kvbm_cli.size import report as body
    from kvbm_cli.size.request import SizeRequest

    if list_:
        body.show_catalogue(as_json=json)
        return 0
    engine_options = {"--engine": engine, "--tp": tp, "--pp": pp, "--kv-cache-dtype": kv_cache_dtype}
    block_options = {"--block-size": block_size, "--layout": layout, "--host": host, "--disk": disk, "--length": length}
    memory_options = {"--gpu": gpu, "--gpu-memory": gpu_memory, "--weights": weights, "--doctor": doctor_}
    demand = {"--tokens": tokens, "--users": users, "--turns": turns, "--turn-tokens": turn_tokens}
    options = {**engine_options, **block_options, **memory_options, **demand}
    given = {name: str(text) for name, text in options.items() if text is not None}
    return body.show_size(SizeRequest(profile or (), model, set_ or [], given), as_json=json, is_strict=strict)
