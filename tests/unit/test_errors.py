"""The exception family, and the translation of the native library's statuses."""

import re
from pathlib import Path

import pytest

from mlxdist.base import errors

HEADER = Path(__file__).parents[2] / "native" / "include" / "mlxdist.h"


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


@pytest.mark.parametrize(
    "text, expected",
    [
        ("x [rank 1 on mac2 in all_sum #413 of float32 [3, 4]]", (1, "mac2", "all_sum", 413)),
        ("x [rank 0 on a-b.local in reduce (max) #1 with root 2 of int8 []]", (0, "a-b.local", "reduce (max)", 1)),
        ("x [rank 12 on h in barrier #7]", (12, "h", "barrier", 7)),
        ("x [rank 1 on h in finalize]", (1, "h", "finalize", None)),
        ("x [rank 3 on h]", (3, "h", None, None)),
        ("rank 2 on b aborted: Timeout: y [rank 1 on h in all_sum #4 of bool [1]]", (1, "h", "all_sum", 4)),
        ("rank 1 waited", (None, None, None, None)),
        ("x [rank 1 on h] and more", (None, None, None, None)),
        ("x [rank -1 on h]", (None, None, None, None)),
        ("", (None, None, None, None)),
    ],
)
@pytest.mark.parametrize("kind", [errors.Timeout, errors.VersionMismatch, errors.Error])
def test_the_host_of_the_cause(text, expected, kind):
    error = kind(text)
    assert (error.rank, error.host, error.operation, error.sequence) == expected
    assert str(error) == text


def test_a_location_is_added_once_and_kept_when_a_text_is_truncated():
    once = errors.located("no memory", 2, "mac2")
    assert once == "no memory [rank 2 on mac2]"
    assert errors.located(f"rank 1 could not connect: {once}", 1, "mac1") == f"rank 1 could not connect: {once}"
    long = errors.located("ä" * 5000, 2, "mac2")
    assert len(long.encode()) <= 1000 and errors.Error(long).rank == 2


@pytest.mark.parametrize(
    "error, text",
    [
        (KeyboardInterrupt(), "rank 1 on mac1 was interrupted (SIGINT) [rank 1 on mac1]"),
        (SystemExit(143), "rank 1 on mac1 was terminated (SIGTERM) [rank 1 on mac1]"),
        (SystemExit(3), "rank 1 on mac1 exited with status 3 [rank 1 on mac1]"),
        (OSError("no space"), "rank 1 on mac1 has failed: OSError: no space [rank 1 on mac1]"),
    ],
)
def test_errors_of_other_libraries_reach_other_ranks_as_aborted(error, text):
    found = errors.interruption(error, 1, "mac1")
    assert type(found) is errors.Aborted and str(found) == text


@pytest.mark.parametrize("name", ["SystemExit", "from_status", "re", "", "__all__"])
def test_a_name_that_is_no_class_of_the_family(name):
    assert errors.by_name(name) is errors.Error


def test_classes_by_name():
    assert errors.by_name("PeerLost") is errors.PeerLost and errors.by_name("Error") is errors.Error


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
