"""The split of a time to first token that bench/peers/ttft.py reports with --trace."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "peers"))

from load_split import medians, read, split

SENT_AT, TTFT_S = 10.0, 0.1
STEPS = [
    ("arrived", 10.003, {"id": "r"}),
    ("ordered", 10.004, {"tokens": {}}),
    ("bound", 10.005, {}),
    ("ended", 10.006, {}),
    ("copied", 10.008, {"began": 10.0055, "cpu_s": 0.002, "core": 1}),
    ("ordered", 10.0085, {"tokens": {"other": 1}}),
    ("bound", 10.0086, {}),
    ("copied", 10.009, {"began": 10.0061, "cpu_s": 0.001, "core": 0}),
    ("reported", 10.011, {"ids": ["r"]}),
    ("ended", 10.0111, {}),
    ("ordered", 10.012, {"tokens": {"r": 32}}),
    ("ended", 10.090, {}),
]
PARTS_MS = {
    "arrived": 3, "ordered": 1, "bound": 1, "began": 0.5, "copied": 3.5, "reported": 2, "scheduled": 1, "computed": 78,
    "answered": 10,
}  # fmt: skip


def moments(steps):
    return [{"moment": name, "at": at, **fields} for name, at, fields in steps]


def test_the_parts_of_a_host_hit_add_up_to_its_time_to_first_token():
    found = split(moments(STEPS), SENT_AT, TTFT_S)
    assert {name: seconds * 1000 for name, seconds in found.parts.items()} == pytest.approx(PARTS_MS)
    assert sum(found.parts.values()) == pytest.approx(TTFT_S)
    assert (found.steps_before, found.copy_cores) == (2, (0, 1))
    assert found.copy_cpu_s == pytest.approx(0.003)


def test_a_hit_in_g1_has_no_parts_of_a_load():
    steps = [step for step in STEPS if step[0] not in ("copied", "reported") and step[1] != 10.004]
    found = split(moments(steps), SENT_AT, TTFT_S)
    assert list(found.parts) == ["arrived", "scheduled", "computed", "answered"]
    assert medians([found, found])["scheduled"] == 9


def test_moments_of_all_processes_are_merged_and_a_line_that_is_being_written_is_left_out(tmp_path):
    for number in (0, 1):
        lines = [json.dumps(moment) for moment in moments(STEPS[number::2])]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines) + '\n{"moment": "arr')
    assert [moment["at"] for moment in read(tmp_path)] == [at for _, at, _ in STEPS]
