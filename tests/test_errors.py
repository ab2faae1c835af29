"""The exception family, and the translation of the native library's statuses."""

import re
from pathlib import Path

import pytest

from mlxdist import errors

HEADER = Path(__file__).parent.parent / "native" / "include" / "mlxdist.h"


def statuses_of_header() -> dict[str, int]:
    body = re.search(r"typedef enum mlxdist_status \{(.*?)\}", HEADER.read_text(), re.S)[1]
    return {name: int(number) for name, number in re.findall(r"MLXDIST_(\w+) = (\d+)", body)}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("INVALID_ARGUMENT", errors.InvalidArgument),
        ("MISMATCH", errors.Mismatch),
        ("TIMEOUT", errors.Timeout),
        ("ABORTED", errors.Aborted),
        ("PEER_LOST", errors.PeerLost),
        ("TRANSPORT", errors.TransportError),
        ("RESOURCES", errors.ResourceError),
    ],
)
def test_status_becomes_its_class(name, expected):
    error = errors.from_status(statuses_of_header()[name], "rank 1: text")
    assert type(error) is expected
    assert str(error) == "rank 1: text"


def test_every_status_of_the_header_has_a_class_of_its_own():
    numbers = set(statuses_of_header().values()) - {0}
    classes = {type(errors.from_status(number, "text")) for number in numbers}
    assert len(classes) == len(numbers) > 0
    assert errors.Error not in classes


def test_classes_become_their_status_again():
    for number in set(statuses_of_header().values()) - {0}:
        assert errors.to_status(errors.from_status(number, "text")) == number
    assert errors.to_status(errors.RendezvousError("text")) == statuses_of_header()["ABORTED"]


@pytest.mark.parametrize(
    "kind", [errors.Mismatch, errors.RendezvousError, errors.EnvironmentVariableError, errors.VersionMismatch]
)
def test_class_survives_its_way_through_c(kind):
    status, text = re.fullmatch(r"\[mlxdist (\d+)\] (.*)", errors.to_tagged_text(kind("rank 1: text"))).groups()
    assert type(errors.from_status(int(status), text)) is kind and text == "rank 1: text"


def test_unknown_status_is_an_error_that_shows_it():
    error = errors.from_status(99, "text")
    assert type(error) is errors.Error
    assert "text" in str(error) and "99" in str(error)


def test_success_is_no_error():
    with pytest.raises(ValueError):
        errors.from_status(0, "text")


@pytest.mark.parametrize(
    "error, builtin",
    [
        (errors.InvalidArgument, ValueError),
        (errors.Timeout, TimeoutError),
        (errors.VersionMismatch, ImportError),
        (errors.EnvironmentVariableError, ValueError),
    ],
)
def test_error_is_also_python_s_own(error, builtin):
    raised = error("rank 1: text")
    assert isinstance(raised, builtin) and isinstance(raised, errors.Error) and isinstance(raised, RuntimeError)
    assert str(raised) == "rank 1: text"


def test_all_names_exist():
    assert all(hasattr(errors, name) for name in errors.__all__)


@pytest.mark.parametrize(
    "ranks, words",
    [
        ([2], "rank 2"),
        ([3, 1], "ranks 1 and 3"),
        ([0, 1, 2], "ranks 0, 1 and 2"),
        (range(1, 9), "ranks 1, 2, 3, 4, 5, 6, 7 and 8"),
        (range(64), "ranks 0, 1, 2, 3 and 60 more"),
    ],
)
def test_ranks_in_words(ranks, words):
    assert errors.name_ranks(ranks) == words
