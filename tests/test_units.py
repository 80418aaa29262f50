"""Bytes, seconds and flops as text."""

from __future__ import annotations

import math

import pytest

from polyreme import units
from polyreme.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("1_000", 1000),
        ("24 GiB", 24 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 KiB", 1536),
        ("0.1 GiB", 107374182),
        (" 2 kB ", 2000),
    ],
)
def test_bytes_are_exact(text: str, n_bytes: int) -> None:
    assert units.parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1.5 ms", 1.5e-3), ("2 min 5 s", 125.0), ("3 µs", 3e-6), ("0.25", 0.25), ("1 d 1 h", 90000)],
)
def test_seconds(text: str, seconds: float) -> None:
    assert units.parse_seconds(text) == seconds


def test_rates() -> None:
    assert units.parse_flops("989 Tflops") == 989e12
    assert units.parse_bytes_s("450 GB/s") == 450e9
    assert units.parse_bytes_s("100 Gbit/s") == 12.5e9


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "1 XB",
        "-5 GB",
        "1 2",
        "nan",
        "inf",
        "1..2 GB",
        "1e999 B",
        "GB 5",
        "5 GB,",
        "٣ B",
    ],
)
def test_other_text_is_refused_with_the_field_and_a_legal_value(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        units.parse_bytes(text, "hosts[0].memory")
    (violation,) = caught.value.violations
    assert (violation.path, violation.value) == ("hosts[0].memory", text)
    assert units.parse_bytes(violation.legal.split('"')[1]) > 0


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2**20 - 1, "1 MiB"),
        (25769803776, "24 GiB"),
        (80e9, "74.5 GiB"),
        (-5, "-5 B"),
        (math.nan, "nan B"),
    ],
)
def test_bytes_printed(n_bytes: float, text: str) -> None:
    assert units.show_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0015, "1.5 ms"),
        (0.99999, "1 s"),
        (59.96, "1 min"),
        (125, "2 min 5 s"),
        (3599.6, "1 h"),
        (84600, "23 h 30 min"),
        (86399, "1 d"),
        (90000, "1 d 1 h"),
        (-125, "-2 min 5 s"),
        (math.inf, "inf s"),
    ],
)
def test_seconds_printed(seconds: float, text: str) -> None:
    assert units.show_seconds(seconds) == text


def test_rates_printed() -> None:
    assert units.show_flops(9.89e14) == "989 Tflops"
    assert units.show_bytes_s(4.5e11) == "450 GB/s"


@pytest.mark.parametrize("exponent", range(-9, 18))
def test_what_is_printed_parses_to_three_digits(exponent: int) -> None:
    for mantissa in (1.0, 1.234, 9.996):
        value = mantissa * 10.0**exponent
        assert units.parse_seconds(units.show_seconds(value)) == pytest.approx(value, rel=0.02)
        if exponent >= 0:
            assert units.parse_bytes(units.show_bytes(value)) == pytest.approx(
                value, rel=0.01, abs=1
            )
            assert units.parse_flops(units.show_flops(value)) == pytest.approx(value, rel=0.01)
