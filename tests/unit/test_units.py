from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotwarp_fs.core.errors import ExitCode, UserError
from spotwarp_fs.core.units import (
    DURATION_MAX_S,
    SIZE_MAX,
    exact_duration,
    exact_size,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

sizes = st.one_of(st.integers(0, SIZE_MAX), st.integers(0, 1 << 20).map(lambda count: count << 30))
milliseconds = st.integers(0, DURATION_MAX_S * 1000)


@given(sizes)
def test_an_exact_size_reads_back_as_itself(size: int) -> None:
    assert parse_size(exact_size(size)) == size


@given(milliseconds)
def test_an_exact_duration_reads_back_as_itself(count: int) -> None:
    assert parse_duration(exact_duration(count / 1000)) == pytest.approx(count / 1000, abs=1e-9)


@given(st.integers(0, 8000), st.sampled_from("KMGTP"), st.sampled_from(["", "B", "iB", "b", "ib"]), st.booleans())
def test_every_spelling_of_a_unit_counts_in_1024s(count: int, letter: str, ending: str, lower: bool) -> None:
    text = f"{count}{letter.lower() if lower else letter}{ending}"
    assert parse_size(text) == count * 1024 ** ("KMGTP".index(letter) + 1)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("500MB", 500 << 20), ("1.5GiB", 3 << 29), (" 7 k ", 7168), ("12b", 12), ("0.5", 0), (4096, 4096)],
)
def test_sizes_that_people_write(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("5m", 300),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("1.5h", 5400),
        ("2D", 172_800),
        ("45", 45),
        (2.5, 2.5),
    ],
)
def test_durations_that_people_write(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "-1G",
        "1e9",
        "nan",
        "inf",
        "1..5G",
        "1,5G",
        "5X",
        "iB",
        "5iB",
        "1G2",
        "0x10",
        "٣",
        "1_000",
        "9" * 40,
        "9999P",
    ],
)
def test_a_size_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    "text", ["", "s", "-5s", "5x", "30m1h", "1m1m", "1h30", "1:30", "nan", "inf", "5 weeks", "1e3", "٣s", "99999999d"]
)
def test_a_duration_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@given(st.text(max_size=12), st.sampled_from([parse_size, parse_duration]))
def test_any_text_gives_a_number_or_a_user_error(text: str, parse: Callable[[str], float]) -> None:
    number, complaint = 0.0, None
    try:
        number = parse(text)
    except UserError as error:
        complaint = str(error)
    assert number >= 0
    assert complaint is None or repr(text) in complaint


@given(sizes)
def test_a_size_for_humans_is_short_and_within_half_a_percent(size: int) -> None:
    shown = format_size(size)
    assert len(shown) <= 8
    assert abs(parse_size(shown.replace("EiB", "").strip()) - size) <= size * 0.006 or shown.endswith("EiB")


@given(st.floats(0, DURATION_MAX_S))
def test_a_duration_for_humans_loses_less_than_its_second_unit(seconds: float) -> None:
    shown = format_duration(seconds)
    assert len(shown) <= 13
    read = parse_duration(shown.replace("min", "m").replace(" ", ""))
    assert abs(read - seconds) <= max(0.05, 0.0005 if seconds < 1 else 0, 0.5 if seconds < 60 else seconds / 23)
