"""The tuning table: kept in a file, handed to all ranks, and refused when it is malformed."""

import json
import struct

import pytest

from mlxdist.base.environment import Environment
from mlxdist.base.errors import EnvironmentVariableError, InvalidArgument
from mlxdist.runtime import tuning
from mlxdist.runtime.native import ffi, lib
from mlxdist.runtime.tuning import MAX_BYTES, MAX_ROWS, Row
from mlxdist.tools.bench.tune import choose

ROWS = [
    Row("all_reduce", 2, 4096, "direct"),
    Row("all_reduce", 2, MAX_BYTES, "mesh"),
    Row("all_reduce", 1024, 0, "ring"),
    Row("barrier", 2, 0, "doubling"),
    Row("reduce", 2, 1 << 40, "tree"),
]
ROW = {"operation": "all_reduce", "ranks": 2, "bytes": 4096, "algorithm": "ring"}


def table(*rows, **fields):
    return json.dumps({"schema": 1, "rows": list(rows)} | fields)


def test_a_file_holds_what_was_written(tmp_path):
    path = tmp_path / "new" / "tuning.json"
    tuning.write(path, ROWS)
    assert tuning.read(path) == ROWS
    tuning.write(path, ROWS[:1])
    assert tuning.read(path) == ROWS[:1]
    tuning.write(path, [])
    assert tuning.read(path) == []
    assert list(path.parent.iterdir()) == [path]  # no temporary file stays
    assert set(json.loads(path.read_text())) == {"schema", "machine", "date", "rows"}


def test_rows_that_could_not_be_read_are_not_written(tmp_path):
    path = tmp_path / "tuning.json"
    with pytest.raises(InvalidArgument, match="row 2 never counts"):
        tuning.write(path, [ROWS[0], ROWS[0]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rows", [[], ROWS], ids=["empty", "rows"])
def test_all_ranks_get_what_rank_0_packed(rows):
    packed = tuning.pack(rows)
    assert len(packed) == 8 + 16 * len(rows)
    assert tuning.unpack(packed) == rows


def test_numbers_are_those_of_the_engine():
    for names, enumeration in ((tuning.OPERATIONS, "mlxdist_operation"), (tuning.ALGORITHMS, "mlxdist_algorithm")):
        elements = {name: number for number, name in ffi.typeof(f"enum {enumeration}").elements.items()}
        elements.pop("MLXDIST_AUTO", None)
        assert elements == {f"MLXDIST_{name.upper()}": number for number, name in enumerate(names, 1)}
    native = ffi.new("mlxdist_tuning *", ROWS[4].native())
    assert (native.operation, native.ranks, native.bytes) == (lib.MLXDIST_REDUCE, 2, 1 << 40)
    assert native.algorithm == lib.MLXDIST_TREE


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "line 1, column 1"),
        ('{"schema": 1,\n "rows": [}', "line 2, column 11"),
        ("[]", "not a JSON object"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        (table(), None),
        (table(schema=2), "its schema is 2, and this mlxdist reads 1"),
        (table(schema=True), "its schema is True"),
        (json.dumps({"rows": []}), "its schema is None"),
        (table(colour="red"), "there is no field 'colour'"),
        (json.dumps({"schema": 1}), '"rows" must be a list'),
        (table(ROW, ROW | {"bytes": 5000}, 7), "row 3 must have the fields operation, ranks, bytes, algorithm"),
        (table(ROW | {"note": ""}), "row 1 must have the fields"),
        (table({"operation": "all_reduce"}), "row 1 must have the fields"),
        (table(ROW | {"operation": "all_som"}), "row 1: operation is 'all_som', not one of all_reduce, all_gather"),
        (table(ROW | {"operation": []}), "row 1: operation is []"),
        (table(ROW | {"algorithm": "auto"}), "row 1: algorithm is 'auto', not one of direct"),
        (table(ROW | {"ranks": 1}), "row 1: ranks is 1, not a whole number from 2 to 1024"),
        (table(ROW | {"ranks": 1025}), "row 1: ranks is 1025"),
        (table(ROW | {"ranks": True}), "row 1: ranks is True"),
        (table(ROW | {"ranks": "2"}), "row 1: ranks is '2'"),
        (table(ROW | {"bytes": 4096.0}), "row 1: bytes is 4096.0"),
        (table(ROW | {"bytes": -1}), "row 1: bytes is -1"),
        (table(ROW | {"bytes": MAX_BYTES + 1}), f"row 1: bytes is {MAX_BYTES + 1}"),
        (table(ROW | {"bytes": None}).replace("null", "NaN"), "NaN is not a number of JSON"),
        (table(ROW | {"bytes": None}).replace("null", "1" * 5000), "digits"),
        (table(ROW).replace('"ranks": 2', '"ranks": 2, "ranks": 3'), "'ranks' is there twice"),
        (table(ROW, ROW | {"algorithm": "mesh"}), "row 2 never counts, because row 1 is for all_reduce on 2 ranks"),
        (table(*[ROW] * (MAX_ROWS + 1)), f"{MAX_ROWS + 1} rows, and at most {MAX_ROWS}"),
        (" " * (1 << 20) + table(), "more than 1048576 bytes"),
    ],
)
def test_malformed_files(tmp_path, text, words):
    path = tmp_path / "tuning.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    if words is None:
        assert tuning.read(path) == []
        return
    with pytest.raises(InvalidArgument) as caught:
        tuning.read(path)
    assert words in str(caught.value), str(caught.value)
    assert str(path) in str(caught.value) and "MLXDIST_TUNING_FILE=none" in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(path))


def packed(rows, **changes):
    head = {"magic": b"MLXT", "schema": 1, "count": len(rows)} | changes
    return struct.pack("<4sHH", *head.values()) + b"".join(struct.pack("<HHHxxQ", *row) for row in rows)


GOOD = (1, 2, 3, 4096)


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "0 bytes"),
        (packed([GOOD])[:-1], "1 rows need 24 bytes, not 23"),
        (packed([GOOD]) + b"\0", "not 25"),
        (packed([GOOD], count=0), "0 rows need 8 bytes, not 24"),
        (packed([GOOD], magic=b'{"sc'), "it begins with"),
        (packed([GOOD], schema=2), "it begins with"),
        (packed([GOOD] * (MAX_ROWS + 1)), f"at most {MAX_ROWS}"),
        (packed([(0, 2, 3, 1)]), "row 1 has operation 0"),
        (packed([(9, 2, 3, 1)]), "row 1 has operation 9"),
        (packed([GOOD, (1, 2, 0, 9999)]), "row 2 has operation 1 and algorithm 0"),
        (packed([(1, 2, 6, 1)]), "algorithm 6"),
        (packed([(1, 1, 1, 1)]), "row 1: ranks is 1"),
        (packed([GOOD, GOOD]), "row 2 never counts"),
    ],
)
def test_malformed_bytes(data, words):
    with pytest.raises(InvalidArgument) as caught:
        tuning.unpack(data)
    assert words in str(caught.value), str(caught.value)


def test_every_cut_of_the_bytes_is_refused():
    whole = tuning.pack(ROWS)
    for length in range(len(whole)):
        with pytest.raises(InvalidArgument):
            tuning.unpack(whole[:length])


def test_which_file_is_read(tmp_path, monkeypatch):
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    default = tmp_path / "mlxdist" / "tuning.json"
    assert tuning.default_path(environ) == default
    assert tuning.load(None, environ) == []  # need not exist
    tuning.write(default, ROWS[:1])
    assert tuning.load(None, environ) == ROWS[:1]
    assert tuning.load("none", environ) == []
    named = tmp_path / "named.json"
    with pytest.raises(InvalidArgument, match="named.json: No such file"):
        tuning.load(str(named), environ)
    tuning.write(named, ROWS)
    assert tuning.load(str(named), environ) == ROWS
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning.default_path({}) == tmp_path / ".config" / "mlxdist" / "tuning.json"


def test_the_variable():
    assert Environment.read({"MLXDIST_TUNING_FILE": "/a/b"}).tuning_file == "/a/b"
    assert Environment.read({}).tuning_file is None
    with pytest.raises(EnvironmentVariableError, match="MLXDIST_TUNING_FILE is empty"):
        Environment.read({"MLXDIST_TUNING_FILE": ""})


def test_a_new_measurement_replaces_what_it_measured_and_nothing_else():
    new = [Row("all_reduce", 2, MAX_BYTES, "ring"), Row("broadcast", 2, MAX_BYTES, "tree")]
    merged = tuning.merge(ROWS, new)
    assert sorted(merged, key=str) == sorted([*new, *ROWS[2:]], key=str)
    assert tuning.unpack(tuning.pack(merged)) == merged  # no row hides another


def case(size, default="direct", **microseconds):
    return {"operation": "all_reduce", "bytes": size, "default": default, "microseconds": microseconds}


def test_the_fastest_is_chosen_up_to_the_middle_of_two_sizes():
    rows = choose([case(4096, direct=1.0, ring=2.0), case(16384, direct=4.0, ring=2.0)], 4)
    assert rows == [Row("all_reduce", 4, 8192, "direct"), Row("all_reduce", 4, MAX_BYTES, "ring")]


def test_equal_choices_are_one_row():
    rows = choose([case(1, ring=1.0, mesh=2.0), case(4, ring=1.0, mesh=2.0)], 2)
    assert rows == [Row("all_reduce", 2, MAX_BYTES, "ring")]


def test_what_is_as_fast_does_not_change_the_choice():
    """Within 10 % the default stays, then what was chosen for the smaller size."""
    assert choose([case(1, direct=1.09, ring=1.0)], 2)[0].algorithm == "direct"
    assert choose([case(1, direct=1.11, ring=1.0)], 2)[0].algorithm == "ring"
    rows = choose([case(1, direct=2.0, mesh=1.5, ring=1.0), case(4, direct=2.0, mesh=1.0, ring=1.09)], 2)
    assert [row.algorithm for row in rows] == ["ring"]
    rows = choose([case(1, direct=2.0, ring=1.0), case(4, direct=1.09, ring=1.0)], 2)
    assert [row.algorithm for row in rows] == ["ring", "direct"]
