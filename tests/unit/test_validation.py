"""Checks of values: numbers at the ends of their ranges, fields with defaults, and names that do not exist."""

import math
from dataclasses import dataclass

import pytest

from mlxdist.base.validation import (
    build,
    checked,
    finite,
    list_of,
    number,
    object_of,
    positive,
    seconds,
    share,
    suggestion,
)

LARGEST = 1.7976931348623157e308


@pytest.mark.parametrize(
    ("check", "accepted", "rejected", "wanted"),
    [
        (number(1, 4), (1, 4), (0, 5, 1.0, True, "1", None), "a whole number from 1 to 4"),
        (share, (0, 0.5, 1), (-1e-9, 1 + 1e-9, True, "1", [], math.nan, 10**400), "a number from 0 to 1"),
        (finite, (0, -LARGEST, LARGEST), (math.inf, -math.inf, math.nan, 10**400, False), "a finite number"),
        (positive(2), (1e-300, 2), (0, -1, 2.1, math.nan, math.inf), "a number above 0 and at most 2"),
        (seconds, (0, 1e12), (-1, 1.1e12, math.nan, math.inf), "a number of seconds"),
    ],
)
def test_numbers(check, accepted, rejected, wanted):
    assert [check("x", value) for value in accepted] == list(accepted)
    for value in rejected:
        with pytest.raises(ValueError) as found:
            check("x", value)
        assert str(found.value) == f"x is {value!r:.50}, not {wanted}"


@dataclass
class Inner:
    size: int = checked(number(0, 9))


@dataclass
class Outer:
    inner: tuple[Inner, ...] = checked(list_of(object_of(Inner), 2), ())
    names: dict = checked(lambda name, value: value, {})


def test_a_dataclass_from_json():
    assert build(Outer, {"inner": [{"size": 3, "more": 1}], "names": {"a": 1}}) == Outer((Inner(3),), {"a": 1})
    with pytest.raises(ValueError, match="^names is missing$"):
        build(Outer, {"inner": []})
    with pytest.raises(ValueError, match="^size is 10, not a whole number from 0 to 9$"):
        build(Outer, {"inner": [{"size": 10}], "names": {}})


def test_a_default_is_not_shared():
    Outer().names["a"] = 1
    assert Outer().names == {}


def test_names_that_do_not_exist():
    known = ("rank", "scale", "dropout")
    assert suggestion("drop_out", known, "lora.") == "did you mean lora.dropout?"
    assert suggestion("alpha", known, "lora.") == "there are rank, scale, dropout"
