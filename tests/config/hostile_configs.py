"""Sizes models with configurations that nobody should trust, under a limit of memory.

    python tests/config/hostile_configs.py SEED COUNT

Each round changes one to three facts of a well-known model, writes the files of a model, and asks `kvbm size` about it.
The program ends with 0 if every answer is a size or a short error.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MEMORY_BYTES = 1 << 30  # of address space; the program itself takes about 300 MiB
LONGEST_S = 5.0
LONGEST_TEXT = 10_000

DEEP = "[" * 100_000
VALUES = [
    *("null", "0", "-1", "-1000000000000", "1000000000000", "2147483647", "9" * 4000, "9" * 5000, "1e308", "1e999"),
    *("NaN", "-Infinity", "1.5", "true", "false", '""', '"8"', '"full_attention"', '"\\u001b[31m"', '"\\ud800"'),
    *(
        "[]",
        "{}",
        "[1]",
        "[[1]]",
        '["full_attention"]',
        '["M"]',
        '[{"attention": {"no_op": true}}]',
        '{"num_bits": 1e9}',
    ),
    *(json.dumps("x" * 1_000_000), json.dumps([1] * 300_000), json.dumps(["full_attention"] * 300_000)),
    *(
        json.dumps("M" * 1_000_000),
        json.dumps([{"attention": {"n_heads_in_group": 1}}] * 100_000),
        "[" * 500 + "]" * 500,
    ),
]
WHOLE_FILES = ["", "null", "[]", "{", DEEP, "\x00", '{"a":' * 2000, '{"architectures": "x"}', "\ud800", "9" * 100_000]
SECTIONS = ("quantization_config", "text_config", "compression_config", "linear_attn_config", "architectures")
FILES = ("hf_quant_config.json", "model.safetensors.index.json")


def hostile(generator: random.Random, number: int) -> Iterator[tuple[str, str]]:
    """Names and contents of the files of one model. The first rounds try every value as the number of layers."""
    from kvbm.sizing.catalogue import catalogue

    facts = copy.deepcopy(dict(catalogue()[generator.choice(sorted(catalogue()))]))
    inner = facts.get("text_config", facts)
    assert isinstance(inner, dict)
    if number < len(VALUES):
        inner["num_hidden_layers"] = f"@{number}@"
    for _ in range(0 if number < len(VALUES) else generator.randint(1, 3)):
        place = generator.choice([facts, inner])
        place[generator.choice([*sorted(place), *SECTIONS])] = f"@{generator.randrange(len(VALUES))}@"
    text = json.dumps(facts)
    for index, value in enumerate(VALUES):
        text = text.replace(f'"@{index}@"', value)
    yield "config.json", generator.choice(WHOLE_FILES) if number > 40 and generator.random() < 0.05 else text
    name = generator.choice([*FILES, ""])
    if name:
        value = generator.choice(VALUES)
        yield name, generator.choice([value, f'{{"metadata": {{"total_size": {value}}}}}', *WHOLE_FILES])


def main(seed: int, count: int) -> int:
    from kvbm_cli.app import run

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.environ["XDG_STATE_HOME"] = tempfile.gettempdir()  # of crash reports
    generator, codes = random.Random(seed), []
    for number in range(count):
        with tempfile.TemporaryDirectory() as directory:
            for name, text in hostile(generator, number):
                Path(directory, name).write_text(text, errors="surrogatepass")
            engine = generator.choice(["vllm", "tensorrt-llm", "sglang"])
            words = ["size", directory, "--engine", engine, *generator.choice([[], ["--json"]])]
            if engine == "vllm" and generator.random() < 0.3:
                words += ["--gpu", "h100"]
            out, err = io.StringIO(), io.StringIO()
            started = time.thread_time()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run(words)
            taken_s, said = time.thread_time() - started, out.getvalue() + err.getvalue()
            codes.append(code)
            is_short = len(said) < LONGEST_TEXT and taken_s < LONGEST_S
            if code not in (0, 1, 2) or "Traceback" in said or "a bug in kvbm" in said or not is_short:
                config = Path(directory, "config.json").read_text(errors="replace")[:3000]
                print(f"round {number} of seed {seed}: {code}, {taken_s:.1f} s\n{said[:3000]}\n{config}")
                return 1
    print({code: codes.count(code) for code in sorted(set(codes))})
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
