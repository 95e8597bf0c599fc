"""Numbers shown to users are rounded so that a bound remains a bound."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.writing import number_format
from accountant_service.writing.number_format import as_written, round_fraction
from training_client.lab import number_format as client_number_format

NUMBERS = st.floats(min_value=0, max_value=1e300) | st.floats(min_value=1e-6, max_value=100)


@given(NUMBERS, st.integers(1, 12))
def test_bounds_stay_bounds(number: float, places: int) -> None:
    value = Decimal(number)
    shown = (
        Decimal(number_format.round_up(number, places)),
        Decimal(number_format.round_down(number, places)),
    )
    unit = Decimal(10) ** (value.adjusted() - places + 1) if number else Decimal(0)
    assert Decimal(repr(number)) <= shown[0] <= Decimal(repr(number)) + unit
    assert Decimal(repr(number)) - unit <= shown[1] <= Decimal(repr(number))
    ours = Decimal(client_number_format.format_upper_bound(number))
    assert Decimal(repr(number)) <= ours <= Decimal(repr(number)) * (1 + Decimal("1e-5"))
    assert client_number_format.format_upper_bound(2.0) == "2"
    assert client_number_format.format_upper_bound(123450.0) == "123450"


@pytest.mark.parametrize("noise", [0.9, 1.7])
def test_commands_show_bounds_as_bounds(noise: float) -> None:
    run = ["-q", "0.01", "-s", str(noise), "-t", "1000", "-d", "1e-5"]
    claim = json.loads(CliRunner().invoke(cli.app, ["epsilon", *run, "--json"]).stdout)
    text = CliRunner().invoke(cli.app, ["epsilon", *run]).stdout
    shown = re.search(r"ε +([\d.]+)", text)
    interval = re.search(r"([\d.]+) ≤ ε ≤ ([\d.]+)", text)
    assert shown
    assert interval
    assert Decimal(shown[1]) >= Decimal(repr(claim["epsilon"]))
    assert Decimal(interval[1]) <= Decimal(repr(claim["certified"]["epsilon_lower"]))
    assert Decimal(interval[2]) >= Decimal(repr(claim["certified"]["epsilon_upper"]))
    assert Decimal(interval[1]) <= Decimal(shown[1]) <= Decimal(interval[2])


def test_exponents_of_one_digit_are_written_as_such() -> None:
    text = '{"delta": 1e-05, "rate": 2.5e-07, "tiny": 1e-10, "name": "line-05"}'
    shown = '{"delta": 1e-5, "rate": 2.5e-7, "tiny": 1e-10, "name": "line-05"}'
    assert number_format.shorten_exponents(text) == shown


@given(st.fractions(min_value=0, max_value=1), st.booleans())
def test_a_fraction_is_rounded_in_the_direction_that_is_asked(exact: Fraction, up: bool) -> None:
    found = round_fraction(exact, up=up)
    written = Fraction(as_written(found))
    assert (written >= exact) if up else (written <= exact)
    assert abs(written - exact) <= Fraction(1, 2**51)
