"""Bugs in the reader of traces, the curve of hit rates and the script of a trace."""

from __future__ import annotations

from mutant import Mutant

CURVE = "kvbm_cli/bench/trace/hit_rates.py"
SCRIPT = "kvbm_cli/bench/trace/script.py"
SESSIONS = "kvbm_cli/bench/trace/request.py"

MUTANTS = (
    Mutant(
        name="trace-beginning-is-evicted-first",
        bug="A prompt is used from the first to the last block, so an LRU cache loses its beginning first.",
        file=CURVE,
        old="        for node in path:\n            self._pushed_tokens",
        new="        for node in reversed(path):\n            self._pushed_tokens",
        fails="tests/bench/test_trace_analysis.py",
    ),
    Mutant(
        name="trace-runs-join-too-much",
        bug="A block in any slot before the previous one counts as part of the run.",
        file=CURVE,
        old="if slot == run_slot - 1 else",
        new="if slot < run_slot else",
        fails="tests/bench/test_trace_analysis.py",
    ),
    Mutant(
        name="trace-replaced-uses-count",
        bug="A block that was used again counts twice in the distance of older blocks.",
        file=CURVE,
        old="        self._replaced_tokens += token_count\n",
        new="        self._replaced_tokens += 0\n",
        fails="tests/bench/test_trace_analysis.py",
    ),
    Mutant(
        name="trace-prefix-is-ignored",
        bug="Equal ids share a block after any prefix.",
        file=CURVE,
        old="            child = children.get((node, one))\n",
        new="            child = children.get((node, one)) or next(\n"
        "                (found for key, found in children.items() if key[1] == one), None\n"
        "            )\n",
        fails="tests/bench/test_trace_analysis.py -k prefix",
    ),
    Mutant(
        name="trace-content-depends-on-the-line",
        bug="Equal hash ids of two requests become different tokens.",
        file=SCRIPT,
        old="            if (one, length) not in self.pieces:\n",
        new="            if True:\n",
        fails="tests/bench/test_trace_reader.py tests/bench/test_bench_scripts.py",
    ),
    Mutant(
        name="trace-turn-waits-for-a-line",
        bug="A turn waits for the request at the position of its previous turn in the file.",
        file=SCRIPT,
        old="(index_of[placed.previous],)",
        new="(placed.previous,)",
        fails="tests/bench/test_bench_scripts.py -k of_a_trace",
    ),
    Mutant(
        name="trace-whole-prompts-are-added",
        bug="Lines that hold whole prompts are added to the history of their session.",
        file=SESSIONS,
        old="        return is_added and request.session_id is not None\n",
        new="        return request.session_id is not None\n",
        fails="tests/bench/test_bench_scripts.py -k of_a_trace",
    ),
)
