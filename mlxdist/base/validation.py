"""Checks of what JSON from a file or from another host says, which anybody may have written.

What comes out has only known types, numbers within bounds, and text that cannot steer a terminal. A check takes the
name and the value, and returns it or raises ValueError.
"""

from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "Check",
    "as_text",
    "fields_of",
    "flag",
    "list_of",
    "map_of",
    "number",
    "or_null",
    "printable",
    "seconds",
    "text",
]

Check = Callable[[str, Any], Any]

_MOST_SECONDS = 1e12  # in 30000 years


def number(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} is {value!r:.50}, not a whole number from {low} to {high}")
        return value

    return check


def flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{name} is {value!r:.50}, not true or false")
    return value


def seconds(name: str, value: Any) -> float:
    """A time or a duration. Neither endless nor NaN, which Python's JSON reads, too."""
    if type(value) not in (int, float) or not 0 <= value <= _MOST_SECONDS:
        raise ValueError(f"{name} is {value!r:.50}, not a number of seconds")
    return float(value)


def text(most: int = 256) -> Check:
    def check(name: str, value: Any) -> str:
        if type(value) is not str:
            raise ValueError(f"{name} is {value!r:.50}, not a text")
        return printable(value[:most])

    return check


def as_text(name: str, value: Any) -> str:
    """Whatever it is, whole and as it is: not yet for a terminal."""
    return str(value)


def printable(value: str) -> str:
    """Without what steers a terminal."""
    return "".join(c if c.isprintable() else "?" for c in value)


def or_null(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def list_of(check: Check, most: int) -> Check:
    def check_list(name: str, value: Any) -> tuple:
        if type(value) is not list or len(value) > most:
            raise ValueError(f"{name} is no list of at most {most}")
        return tuple(check(name, element) for element in value)

    return check_list


def map_of(check: Check, most: int) -> Check:
    def check_map(name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > most:
            raise ValueError(f"{name} is no object of at most {most}")
        return {text()(name, key): check(name, element) for key, element in value.items()}

    return check_map


def fields_of(checks: Mapping[str, Check], value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError("what should be an object is none")
    if missing := checks.keys() - value.keys():
        raise ValueError(f"{min(missing)} is missing")
    return {name: check(name, value[name]) for name, check in checks.items()}
