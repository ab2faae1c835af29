"""The device map: read from text and files of several shapes, and refused with a message that says where and what."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.device_map import load, parse

MATRIX = [[None, "en2", ["en3", "en4"]], ["en5", None, None], [["en6", "en7"], None, None]]
ROWS = ((), ("en2",), ("en3", "en4")), (("en5",), (), ()), (("en6", "en7"), (), ())
HOSTS = [{"ssh": f"mac-{name}", "ips": ["10.0.0.1"], "rdma": row} for name, row in zip("abc", MATRIX)]


@pytest.mark.parametrize(
    "found", [MATRIX, HOSTS, {"hosts": HOSTS, "backend": "any"}, [{"rdma": row} for row in MATRIX]]
)
def test_shapes(found, tmp_path):
    text = json.dumps(found)
    assert load(text).rows == parse(text).rows == ROWS
    (tmp_path / "hosts.json").write_text(f"\n  {text}\n")
    assert load(str(tmp_path / "hosts.json")).rows == ROWS
    assert load(f"  {text}").devices(0, 2) == ("en3", "en4")


def test_a_map_of_one_host():
    assert parse("[[null]]").rows == (((),),)


@pytest.mark.parametrize(
    "found, message",
    [
        (
            [[None, "en2"], [None, None]],
            r"host 0 has a cable to host 1 \(en2\), but host 1 has null in column 0; write",
        ),
        ([[None, None], ["en2", None]], r"host 1 has a cable to host 0 \(en2\), but host 0 has null in column 1"),
        (
            [[None, ["a", "b"]], ["c", None]],
            r"host 0 has 2 cables to host 1 \(a, b\), but host 1 has 1 to host 0 \(c\)",
        ),
        (
            [[None, "c"], [["a", "b"], None]],
            r"host 1 has 2 cables to host 0 \(a, b\), but host 0 has 1 to host 1 \(c\)",
        ),
        ([["en2", None], [None, None]], r"host 0, column 0: en2 would lead from the host to itself; write null"),
        ([[None, 7], ["en2", None]], r"host 0, column 1: 7 is neither the name of a device, nor a list of names"),
        ([[None, True], ["en2", None]], r"host 0, column 1: true is neither"),
        ([[None, ""], ["en2", None]], r'host 0, column 1: "" is neither'),
        ([[None, []], ["en2", None]], r"host 0, column 1: \[\] is neither .*; write null where there is no cable"),
        ([[None, ["en2", None]], ["en2", None]], r"host 0, column 1: \[.en2., null\] is neither"),
        ([[None, [["en2"]]], ["en2", None]], r"host 0, column 1: \[\[.en2.\]\] is neither"),
        ([[None, "e n"], ["en2", None]], r"host 0, column 1: .e n. is neither"),
        ([[None, "é" * 32], ["en2", None]], r"host 0, column 1: .* is neither"),
        ([[None, "\ud800"], ["en2", None]], r"host 0, column 1: .* is neither"),
        (
            [[None, ["a", "a"]], [["b", "c"], None]],
            r"host 0, column 1: a is there twice; each cable has a device of its",
        ),
        (
            [[None, [f"d{i}" for i in range(17)]], ["a", None]],
            r"host 0, column 1: 17 cables; at most 16 can be named, of which 4 are used",
        ),
        ([[None, "a"], ["b"]], r"the row of host 1 has 1 entries, but there are 2 hosts; write null"),
        ([[None, "a", "b"], ["b", None]], r"the row of host 0 has 3 entries, but there are 2 hosts"),
        ([None, ["a", None]], r"host 0 has no row: a list with an entry for each host$"),
        ([{"ssh": "mac-a"}], r'host 0 \(mac-a\) has no row: .*; write "rdma": \[...\] for each host'),
        ([{"ssh": "mac-a", "rdma": [3]}], r"host 0 \(mac-a\), column 0: 3 is neither"),
        ([], "it must be a list of rows"),
        ({"host": []}, "it must be a list of rows"),
        ([[None] * 1025] * 1025, "it has 1025 rows, and at most 256 are allowed"),
    ],
)
def test_what_is_rejected(found, message):
    with pytest.raises(InvalidArgument, match=f"^device map MLXDIST_DEVICE_MAP: {message}"):
        load(json.dumps(found))


@pytest.mark.parametrize(
    "text, message",
    [
        ('[[null, "a"]', "line 1, column 13: .*; write it as JSON"),
        ("[" * 100000, "it is nested too deeply"),
        ("[[" + "7" * 5000 + "]]", "a number has more than 4300 digits"),
    ],
    ids=["cut off", "deep", "long number"],
)
def test_what_is_no_json(text, message):
    with pytest.raises(InvalidArgument, match=f"^device map MLXDIST_DEVICE_MAP: {message}"):
        load(text)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(
        InvalidArgument, match="hosts.json.*: No such file or directory; MLXDIST_DEVICE_MAP is a matrix such"
    ):
        load(str(tmp_path / "hosts.json"))
    with pytest.raises(InvalidArgument, match="Is a directory"):
        load(str(tmp_path))
    with pytest.raises(InvalidArgument, match="no file has such a name"):
        load("a\0b")
    (tmp_path / "latin").write_bytes(b'[["\xe9"]]')
    with pytest.raises(InvalidArgument, match=r"latin: byte 3 is not UTF-8"):
        load(str(tmp_path / "latin"))
    (tmp_path / "large").write_bytes(b" " * ((16 << 20) + 1))
    with pytest.raises(InvalidArgument, match="more than 16777216 bytes"):
        load(str(tmp_path / "large"))


def test_messages_name_the_file(tmp_path):
    (tmp_path / "hosts.json").write_text("[[1]]")
    with pytest.raises(InvalidArgument, match="hosts.json: host 0, column 0: 1 is neither"):
        load(str(tmp_path / "hosts.json"))


entries = (
    st.none() | st.sampled_from(["en2", "en3", "", 1]) | st.lists(st.sampled_from(["en2", "en3", "en4"]), max_size=3)
)


@settings(deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(entries, min_size=n, max_size=n), min_size=n, max_size=n)))
def test_a_map_that_is_taken_is_symmetric(matrix):
    try:
        found = parse(json.dumps(matrix))
    except InvalidArgument:
        return
    for i in range(found.size):
        assert found.devices(i, i) == ()
        for j in range(found.size):
            assert len(found.devices(i, j)) == len(found.devices(j, i)) == len(set(found.devices(i, j)))
