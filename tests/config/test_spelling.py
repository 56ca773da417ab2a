"""Spellings that users bring along, and the spelling of kvbm that hints show."""

from __future__ import annotations

import pytest

from kvbm.config.spelling import nearest_variable, snake_case, unquoted, written_in_env_file
from kvbm.config.variables import PREFIX, VARIABLES

SUPPORTED = [one.name for one in VARIABLES if one.is_supported]
MEANT = {
    "DISK_CACHE_PATH": "DISK_CACHE_DIR",
    "DISK_CACHE_PATHS": "DISK_CACHE_DIR",
    "DISK_DIR": "DISK_CACHE_DIR",
    "CACHE_DIR": "DISK_CACHE_DIR",
    "SSD_PATH": "DISK_CACHE_DIR",
    "LOCAL_DISK_PATH": "DISK_CACHE_DIR",
    "HOST_CACHE_GB": "CPU_CACHE_GB",
    "CPU_CACHE_SIZE_GB": "CPU_CACHE_GB",
    "MAX_LOCAL_CPU_SIZE": "CPU_CACHE_GB",
    "G2_SIZE": "CPU_CACHE_GB",
    "CPU_CACHE": "CPU_CACHE_GB",
    "DISK_CACHE_SIZE": "DISK_CACHE_GB",
    "MAX_LOCAL_DISK_SIZE": "DISK_CACHE_GB",
    "CPU_CACHE_NUM_BLOCKS": "CPU_CACHE_OVERRIDE_NUM_BLOCKS",
    "DISK_NUM_BLOCKS": "DISK_CACHE_OVERRIDE_NUM_BLOCKS",
    "S3_BUCKET": "OBJECT_BUCKET",
    "S3_ENDPOINT": "OBJECT_ENDPOINT",
    "DISK_ALLOCATOR": "DISK_ALLOCATOR_TYPE",
    "ALLOCATOR": "DISK_ALLOCATOR_TYPE",
    "ZEROFILL": "DISK_ZEROFILL_FALLBACK",
    "INIT_TIMEOUT": "LEADER_WORKER_INIT_TIMEOUT_SECS",
    "METRIC": "METRICS",
}


@pytest.mark.parametrize("name", MEANT)
def test_a_variable_of_another_name_is_found_by_its_meaning(name: str) -> None:
    assert nearest_variable(PREFIX + name, SUPPORTED, prefix=PREFIX) == PREFIX + MEANT[name]


@pytest.mark.parametrize("name", ["LOG", "LOG_LEVEL", "FOO", ""])
def test_a_variable_of_no_similar_meaning_gets_no_suggestion(name: str) -> None:
    assert nearest_variable(PREFIX + name, SUPPORTED, prefix=PREFIX) is None


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_variable_is_nearest_to_itself(name: str) -> None:
    assert nearest_variable(f"export {name.lower()} ", SUPPORTED, prefix=PREFIX) == name


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("maxModelLen", "max_model_len"),
        ("--max-model-len", "max_model_len"),
        ("MAX_MODEL_LEN", "max_model_len"),
        ("enableLoRA", "enable_lora"),
        ("kvCacheDType", "kv_cache_dtype"),
        ("KVCacheDtype", "kv_cache_dtype"),
        ("diskTimeoutS", "disk_timeout_s"),
        ("o_direct", "o_direct"),
    ],
)
def test_a_name_is_converted_to_the_form_of_keys(name: str, key: str) -> None:
    assert snake_case(name) == key


@pytest.mark.parametrize(
    ("text", "meant", "extra"),
    [
        ('"100"', "100", "quotes"),
        ("'100'", "100", "quotes"),
        ("“100”", "100", "quotes"),
        ("\"'100'\"", "100", "quotes"),
        ("100 # GB", "100", "comment"),
        ('"100"  # GB', "100", "quotes and the comment"),
        ('""', "", "quotes"),
    ],
)
def test_what_an_env_file_adds_to_a_value_is_recognised(text: str, meant: str, extra: str) -> None:
    found = written_in_env_file(text)
    assert found is not None
    assert (found.meant, found.extra) == (meant, extra)


@pytest.mark.parametrize("text", ["100", "a#b", "/a'b", '"open', "it's", '"'])
def test_a_value_as_it_should_be_is_left_alone(text: str) -> None:
    assert written_in_env_file(text) is None
    assert unquoted(text) is None
