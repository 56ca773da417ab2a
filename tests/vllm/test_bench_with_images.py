"""`kvbm bench` of a real vLLM that sees: images in chats and responses, blocks back from host memory, equal answers."""

import json

import pytest
from kvbm_serve import QUIET
from media_contents import picture_file
from media_models import media_model
from media_serving import write_profile
from vllm_server import wait_until_old

from kvbm_cli.bench.command import BenchRequest, bench
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.workload.plan import IMAGE, PlannedRequest

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(0)]
IMAGE_TOKENS = 64
USERS, TURNS = 7, 3
WORKLOAD = f"""
name: seen
endpoint: %s
users: {USERS}
turns: {TURNS}
system_tokens: 64
history_tokens: 200
question_tokens: 24
answer_tokens: 8
images: [0.png, 1.png]
schedule: {{arms: in_turn, pairs: 1, interval_s: 1.0}}
"""


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_answers_about_images_are_judged(tmp_path, capsys, monkeypatch, endpoint):
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    wait_until_old(media_model("image"))
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(picture_file(f"rgb {number}")[1])
    (workload := tmp_path / "seen.yaml").write_text(WORKLOAD % endpoint)
    profile = write_profile(tmp_path, None, "image")
    run = tmp_path / "run"
    bench(
        BenchRequest(
            profiles=(str(profile),), compare=("baseline",), workloads=(str(workload),), output=run, as_json=True
        )
    )
    summary = json.loads(capsys.readouterr().out)
    print(summary["explanation"], *summary["reasons"], sep="\n")
    (cell,) = summary["cells"]
    assert summary["outputs_equal"] is True
    assert cell["comparisons"][0]["has_loads"] is True
    assert cell["arms"]["kvbm"]["prompt_tokens"]["g2"] > 1000
    outputs = cell["comparisons"][0]["outputs"]
    assert (outputs["compared"], outputs["different"]) == (USERS * TURNS, 0)
    (measured,) = Results.read(BenchDirectory.open(run)).cells
    assert measured.plan is not None
    of_text = {request.index: text_tokens(request) for request in measured.plan.requests}
    extra = [record.prompt_tokens - of_text[record.index] for record in measured.runs[0].records]
    print(f"prompt tokens beyond the text: {extra}")
    assert min(extra) >= IMAGE_TOKENS, "the images did not reach the model"


def text_tokens(request: PlannedRequest) -> int:
    from transformers import AutoTokenizer

    texts = [part for role, part in zip(request.roles, request.parts, strict=True) if role != IMAGE]
    return len(AutoTokenizer.from_pretrained(media_model("image")).encode("".join(texts)))
