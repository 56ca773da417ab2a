"""Bugs in the causes that `kvbm bench` lists for a missing gain."""

from __future__ import annotations

from mutant import Mutant

LOST = "kvbm_cli/bench/why/tiers.py"
TESTS = "tests/bench/test_bench_reasons.py"

MUTANTS = (
    Mutant(
        name="reasons-omit-a-shared-tier-that-is-off",
        bug="A shared tier that was turned off is not named as a cause.",
        file=LOST,
        old="    if not runs:\n        return None\n    failed",
        new="    if True:\n        return None\n    failed",
        fails=f"{TESTS} -k shared",
    ),
    Mutant(
        name="reasons-blame-g2-without-churn",
        bug="A small G2 is a cause although it evicted few blocks.",
        file=LOST,
        old="    if evicted < CHURN * received:\n",
        new="    if evicted < 0 * received:\n",
        fails=f"{TESTS} -k blamed",
    ),
    Mutant(
        name="reasons-blame-tiers-that-paid",
        bug="Lost blocks are a cause although most tokens were loaded.",
        file=LOST,
        old="facts.saved_share >= FEW",
        new="facts.saved_share > 1",
        fails=f"{TESTS} -k blamed",
    ),
    Mutant(
        name="reasons-against-the-reference",
        bug="What kvbm could save is measured against a reference that has kvbm, too.",
        file="kvbm_cli/bench/why/facts.py",
        old='self.reachable_share, self.measured.share_from("g1")',
        new='self.reachable_share, self.reference.share_from("g1", *LOADED)',
        fails=f"{TESTS} -k another",
    ),
    Mutant(
        name="reasons-count-partial-blocks",
        bug="Repeated tokens count as reusable although their block is not whole.",
        file="kvbm_cli/bench/why/facts.py",
        old="min(old, old + new - 1)) // block_size * block_size",
        new="min(old, old + new - 1))",
        fails=f"{TESTS} -k whole_blocks",
    ),
)
