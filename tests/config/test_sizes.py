from collections.abc import Iterator
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.config.schema import Profile
from kvbm.config.sizes import MAX_BYTES, UNITS, exact_size, format_size, parse_size
from kvbm.types import MAX_SECONDS
from kvbm_cli.bench.workload.schema import Workload


@pytest.mark.parametrize(
    ("text", "byte_count"),
    [
        ("100GB", 100_000_000_000),
        ("64GiB", 64 * 2**30),
        ("2.5GB", 2_500_000_000),
        ("0.5 gib", 2**29),
        ("1B", 1),
        (" 1TB ", 10**12),
        ("1.9B", 1),
        ("1PB", 10**15),
        ("0.5PiB", 2**49),
    ],
)
def test_size_is_read_in_its_unit(text: str, byte_count: int) -> None:
    assert parse_size(text) == byte_count


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be a size such as 100GB or 64GiB, not ``"),
        ("lots", "must be a size such as 100GB or 64GiB, not `lots`"),
        ("-1GB", "must be a size such as 100GB or 64GiB, not `-1GB`"),
        ("1e3GB", "must be a size such as 100GB or 64GiB, not `1e3GB`"),
        ("nan", "must be a size such as 100GB or 64GiB, not `nan`"),
        ("100", "requires a unit, such as `100GB` or `100GiB`"),
        ("5G", "has the unknown unit `G`; units are B, KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB"),
        ("5 Gbit", "has the unknown unit `Gbit`; units are B, KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB"),
        ("1EiB", "has the unknown unit `EiB`; units are B, KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB"),
        ("010MB", "must be a size such as 100GB or 64GiB, not `010MB`"),
        ("1_000MB", "must be a size such as 100GB or 64GiB, not `1_000MB`"),
        ("1,000MB", "must be a size such as 100GB or 64GiB, not `1,000MB`"),
        ("\u0661GB", "must be a size such as 100GB or 64GiB, not `\u0661GB`"),
        ("9" * 300 + "GB", f"must be more than 0 and at most 1024PiB, not `{'9' * 197}...`"),
        ("0GB", "must be more than 0 and at most 1024PiB, not `0GB`"),
        ("0.1B", "must be more than 0 and at most 1024PiB, not `0.1B`"),
        ("9999999TB", "must be more than 0 and at most 1024PiB, not `9999999TB`"),
    ],
)
def test_what_is_not_a_size_says_what_would_be(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(text)
    assert str(caught.value) == complaint


@given(st.integers(1, MAX_BYTES))
def test_every_size_survives_being_written(byte_count: int) -> None:
    assert parse_size(exact_size(byte_count)) == byte_count


@given(st.decimals(min_value=1, max_value=1000, places=3), st.sampled_from(sorted(UNITS)))
def test_a_size_is_its_number_times_its_unit_rounded_down(number: Decimal, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == int(number * UNITS[unit])


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        byte_count = parse_size(text)
    except ValueError:
        return
    assert 0 < byte_count <= MAX_BYTES


def test_sizes_are_shown_in_binary_units() -> None:
    assert [format_size(count) for count in (5, 2048, 3 * 2**20, 2**30, 5 * 2**40)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "1.0 GiB",
        "5.0 TiB",
    ]


def numbers(schema: object) -> Iterator[tuple[str, dict]]:
    """Every key of a JSON schema that is a number with a fraction."""
    if isinstance(schema, dict):
        for name, value in schema.items():
            parts = [value, *value.get("anyOf", [])] if isinstance(value, dict) else []
            yield from ((name, part) for part in parts if part.get("type") == "number")
            yield from numbers(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from numbers(value)


@pytest.mark.parametrize("model", [Profile, Workload])
def test_every_number_has_a_limit_that_the_system_calls_accept(model: type) -> None:
    """An infinite or huge time limit would raise OverflowError in the middle of a start."""
    found = list(numbers(model.model_json_schema()))
    assert found
    assert [name for name, part in found if part.get("maximum", part.get("exclusiveMaximum", 1e9)) > MAX_SECONDS] == []
