"""The two scripts that measure copies still run, check what they copy, and say what they ran on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.mark.soak
@pytest.mark.parametrize("script", ["bench/micro/copy_bandwidth.py", "bench/gpu/check_and_measure.py"])
def test_the_script_checks_and_measures_on_the_cpu(script, tmp_path):
    arguments = ["--quick", "--output", str(tmp_path / "result.json")]
    if "gpu" in script:
        arguments += ["--device", "cpu"]
    output = subprocess.run(
        [sys.executable, REPOSITORY / script, *arguments], capture_output=True, text=True, check=True
    )
    assert "device: cpu\nno GPU was used" in output.stdout
    assert "every byte was right" in output.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["device"], result["is_quick"]) == ("cpu", True)
    assert {row["direction"] for row in result["rows"]} == {"offload", "onboard"}
    assert {row["layout"] for row in result["rows"]} == {"block-contiguous", "layer-separate x16"}
    if "gpu" in script:
        effects = result["effects"]
        assert effects["contexts_on_gpu_0"] == "not checked: no GPU was used"
        assert set(effects["small_loads"]) == {"alone_ms", "behind_long_in_slices_ms", "behind_long_ms"}
        assert set(effects["compute_time_ratio"]) == {"beside_offload", "beside_onboard"}
        assert "failed" not in output.stderr


def test_copies_need_neither_pydantic_nor_an_engine():
    script = (
        "import sys; import kvbm.host.layout, kvbm.host.region, kvbm.device.copier, kvbm.device.cuda, kvbm.device.pool;"
        "print(sorted({'pydantic', 'torch', 'vllm', 'aiohttp'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "bench/results").glob("*-copy-bandwidth.json")), ids=lambda path: path.name
)
def test_committed_bandwidth_reaches_what_is_promised(path):
    result = json.loads(path.read_text())
    assert not result["is_quick"]
    assert min(row["ratio"] for row in result["rows"]) >= result["aim"]
