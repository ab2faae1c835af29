"""The tuning file: its sections are kept, handed to all ranks, and rejected where they are malformed."""

import json

import pytest

from mlxdist.base import tuning_file
from mlxdist.base.environment import MAX_RANKS, Environment
from mlxdist.base.errors import EnvironmentVariableError, InvalidArgument
from mlxdist.cluster.hostfile.rank_shares import check_hosts
from mlxdist.runtime.group import tuning
from mlxdist.runtime.group.tuning import MAX_BYTES, MAX_ROWS, Row, Tuning
from mlxdist.runtime.native import ffi, lib
from mlxdist.tools.calibrate.algorithms import choose, measured_sizes

ROWS = [
    Row("all_reduce", 2, 1, 4096, "direct"),
    Row("all_reduce", 2, 1, MAX_BYTES, "mesh"),
    Row("all_reduce", 256, 2, 0, "ring"),
    Row("barrier", 2, 1, 0, "recursive_doubling"),
    Row("reduce", 2, 2, 1 << 40, "tree"),
]
ROW = {"operation": "all_reduce", "ranks": 2, "hosts": 1, "bytes": 4096, "algorithm": "ring"}


COSTS = {"all_sum": {"latency": 1e-5, "bandwidth": 1e9}}
LINK = {"provider": "soft", "ranks": 2, "hosts": 1, "plan": 1e-4, "costs": COSTS}
TUNING = Tuning(ROWS, [LINK])


def write(path, found):
    tuning_file.update(path, tuning.sections(found))


def table(*rows, **fields):
    return json.dumps({"schema": 3, "algorithms": list(rows)} | fields)


def test_a_file_holds_what_was_written(tmp_path):
    path = tmp_path / "new" / "tuning.json"
    write(path, TUNING)
    assert tuning.read(path) == TUNING
    write(path, Tuning(ROWS[:1]))
    assert tuning.read(path) == Tuning(ROWS[:1])
    write(path, Tuning())
    assert tuning.read(path) == Tuning()
    assert list(path.parent.iterdir()) == [path]  # no temporary file stays
    write(path, TUNING)
    assert set(json.loads(path.read_text())) == {"schema", "machine", "date", "algorithms", "expert_links"}


def test_an_update_keeps_the_other_sections(tmp_path):
    path = tmp_path / "tuning.json"
    tuning_file.update(path, {"hosts": {"a": {"tflops": 1.0, "memory_gbps": 2.0}}})
    write(path, TUNING)
    assert tuning.read(path) == TUNING
    assert tuning_file.read_section(path, "hosts", check_hosts, {})["a"].memory_gbps == 2.0


def test_rows_that_could_not_be_read_are_not_written(tmp_path):
    with pytest.raises(InvalidArgument, match="row 2 never counts"):
        write(tmp_path / "tuning.json", Tuning([ROWS[0], ROWS[0]]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("found", [Tuning(), TUNING], ids=["empty", "full"])
def test_all_ranks_get_what_rank_0_packed(found):
    assert tuning.unpack(tuning.pack(found)) == found


def test_numbers_are_those_of_the_engine():
    for names, enumeration in ((tuning.OPERATIONS, "mlxdist_operation"), (tuning.ALGORITHMS, "mlxdist_algorithm")):
        elements = {name: number for number, name in ffi.typeof(f"enum {enumeration}").elements.items()}
        elements.pop("MLXDIST_AUTO", None)
        assert elements == {f"MLXDIST_{name.upper()}": number for number, name in enumerate(names, 1)}
    assert lib.MLXDIST_MAX_RANKS == MAX_RANKS
    native = ffi.new("mlxdist_tuning *", ROWS[4].native())
    assert (native.operation, native.ranks, native.hosts) == (lib.MLXDIST_REDUCE, 2, 2)
    assert native.bytes == 1 << 40
    assert native.algorithm == lib.MLXDIST_TREE


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "line 1, column 1"),
        ('{"schema": 3,\n "algorithms": [}', "line 2, column 17"),
        ("[]", "not a JSON object"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        ("[" * 100_000, "nested too deeply"),
        (table(), None),
        (table(schema=2), "its schema is 2, and this mlxdist reads 3; remove it and measure again with `mlxdist"),
        (table(schema=True), "its schema is True"),
        (json.dumps({"algorithms": []}), "its schema is None"),
        (table(colour="red"), "there is no field 'colour'; there are schema, machine, date, hosts"),
        (table(algoritms=[]), "there is no field 'algoritms'; did you mean algorithms?"),
        (table(algorithms=7), 'in "algorithms": it is not a list of at most'),
        (table(ROW, ROW | {"bytes": 5000}, 7), "row 3 must have the fields operation, ranks, hosts, bytes, algorithm"),
        (table(ROW | {"note": ""}), "row 1 must have the fields"),
        (table({"operation": "all_reduce"}), "row 1 must have the fields"),
        (table(ROW | {"operation": "all_som"}), "row 1: operation is 'all_som', not one of all_reduce, all_gather"),
        (table(ROW | {"operation": []}), "row 1: operation is []"),
        (table(ROW | {"algorithm": "auto"}), "row 1: algorithm is 'auto', not one of direct"),
        (table(ROW | {"ranks": 1}), "row 1: ranks is 1, not a whole number from 2 to 256"),
        (table(ROW | {"ranks": 1025}), "row 1: ranks is 1025"),
        (table(ROW | {"ranks": True}), "row 1: ranks is True"),
        (table(ROW | {"ranks": "2"}), "row 1: ranks is '2'"),
        (table(ROW | {"hosts": 0}), "row 1: hosts is 0, not a whole number from 1 to 256"),
        (table(ROW | {"hosts": None}), "row 1: hosts is None"),
        (table(ROW | {"hosts": 3}), "row 1: hosts is 3, more than the 2 ranks"),
        (table({name: ROW[name] for name in ROW if name != "hosts"}), "row 1 must have the fields operation, ranks"),
        (table(ROW | {"bytes": 4096.0}), "row 1: bytes is 4096.0"),
        (table(ROW | {"bytes": -1}), "row 1: bytes is -1"),
        (table(ROW | {"bytes": MAX_BYTES + 1}), f"row 1: bytes is {MAX_BYTES + 1}"),
        (table(ROW | {"bytes": None}).replace("null", "NaN"), "NaN is not a number of JSON"),
        (table(ROW | {"bytes": None}).replace("null", "1" * 5000), "digits"),
        (table(ROW).replace('"ranks": 2', '"ranks": 2, "ranks": 3'), "'ranks' is there twice"),
        (table(ROW, ROW | {"algorithm": "mesh"}), "row 2 never counts, because row 1 is for all_reduce on 2 ranks"),
        (table(ROW, ROW | {"hosts": 2}, ROW | {"hosts": 2}), "because row 2 is for all_reduce on 2 ranks (hosts: 2)"),
        (table(*[ROW] * (MAX_ROWS + 1)), f"it is not a list of at most {MAX_ROWS} rows"),
        (table(expert_links=[7]), 'in "expert_links"'),
        (table(expert_links=[LINK | {"plan": -1}]), "plan is -1, not a number above 0"),
        (table(expert_links=[LINK | {"costs": {"all_sum": {"latency": 1}}}]), "bandwidth is missing"),
        (table(expert_links=[LINK | {"ranks": 1}]), "ranks is 1, not a whole number from 2 to 256"),
        (table(expert_links=[LINK | {"hosts": 3}]), "hosts is 3, more than the 2 ranks"),
        (" " * (1 << 20) + table(), "more than 1048576 bytes"),
    ],
)
def test_malformed_files(tmp_path, text, words):
    path = tmp_path / "tuning.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    if words is None:
        assert tuning.read(path) == Tuning()
        return
    with pytest.raises(InvalidArgument) as caught:
        tuning.read(path)
    assert words in str(caught.value), str(caught.value)
    assert str(path) in str(caught.value) and "MLXDIST_TUNING_FILE=none" in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(path))


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "line 1, column 1"),
        (b"[]", "has not the fields algorithms, expert_links"),
        (b'{"algorithms": []}', "has not the fields"),
        (tuning.pack(TUNING)[:-1], "column"),
        (tuning.pack(TUNING).replace(b"direct", b"detour"), "row 1: algorithm is 'detour'"),
        (tuning.pack(TUNING).replace(b'"ranks":256', b'"ranks":257'), "row 3: ranks is 257"),
    ],
)
def test_malformed_bytes(data, words):
    with pytest.raises(InvalidArgument) as caught:
        tuning.unpack(data)
    assert words in str(caught.value) and "that rank 0 sent" in str(caught.value)


def test_every_truncation_of_the_bytes_is_rejected():
    full = tuning.pack(TUNING)
    for length in range(len(full)):
        with pytest.raises(InvalidArgument):
            tuning.unpack(full[:length])


def test_which_file_is_read(tmp_path, monkeypatch):
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    default = tmp_path / "mlxdist" / "tuning.json"
    assert tuning_file.default_path(environ) == default
    assert tuning.load(None, environ) == Tuning()  # need not exist
    write(default, Tuning(ROWS[:1]))
    assert tuning.load(None, environ) == Tuning(ROWS[:1])
    assert tuning.load("none", environ) == Tuning()
    named = tmp_path / "named.json"
    with pytest.raises(InvalidArgument, match="named.json: No such file"):
        tuning.load(str(named), environ)
    write(named, TUNING)
    assert tuning.load(str(named), environ) == TUNING
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning_file.default_path({}) == tmp_path / ".config" / "mlxdist" / "tuning.json"


def test_the_variable():
    assert Environment.read({"MLXDIST_TUNING_FILE": "/a/b"}).tuning_file == "/a/b"
    assert Environment.read({}).tuning_file is None
    with pytest.raises(EnvironmentVariableError, match="MLXDIST_TUNING_FILE='' is empty"):
        Environment.read({"MLXDIST_TUNING_FILE": ""})


def test_a_new_measurement_replaces_what_it_measured_and_nothing_else():
    new = [Row("all_reduce", 2, 1, MAX_BYTES, "ring"), Row("broadcast", 2, 1, MAX_BYTES, "tree")]
    merged = tuning.merge(ROWS, new)
    assert sorted(merged, key=str) == sorted([*new, *ROWS[2:]], key=str)
    assert tuning.sections(Tuning(merged))  # no row hides another
    between = [Row("all_reduce", 2, 2, MAX_BYTES, "ring")]  # each on a host of its own
    assert sorted(tuning.merge(ROWS, between), key=str) == sorted([*between, *ROWS], key=str)


def selected(ranks, *sizes, hosts=1):
    """The rows for times of all_reduce: (size, microseconds of each algorithm)."""
    results = [
        {"case": {"operation": "all_reduce", "bytes": size}, "variant": name, "default": "direct"}
        | {"microseconds": {"median": time}}
        for size, times in sizes
        for name, time in times.items()
    ]
    return choose({"setup": {"ranks": ranks, "host_count": hosts}, "cases": results})


def test_the_fastest_is_selected_up_to_the_middle_of_two_sizes():
    rows = selected(4, (4096, {"direct": 1.0, "ring": 2.0}), (16384, {"direct": 4.0, "ring": 2.0}))
    assert rows == [Row("all_reduce", 4, 1, 8192, "direct"), Row("all_reduce", 4, 1, MAX_BYTES, "ring")]
    rows = selected(4, (4096, {"direct": 2.0, "hierarchical": 1.0}), hosts=2)
    assert rows == [Row("all_reduce", 4, 2, MAX_BYTES, "hierarchical")]


def test_equal_choices_are_one_row():
    rows = selected(2, (1, {"ring": 1.0, "mesh": 2.0}), (4, {"ring": 1.0, "mesh": 2.0}))
    assert rows == [Row("all_reduce", 2, 1, MAX_BYTES, "ring")]


def test_what_is_as_fast_does_not_change_the_choice():
    """Within 10 % the default stays, then what was selected for the smaller size."""
    assert selected(2, (1, {"direct": 1.09, "ring": 1.0}))[0].algorithm == "direct"
    assert selected(2, (1, {"direct": 1.11, "ring": 1.0}))[0].algorithm == "ring"
    rows = selected(2, (1, {"direct": 2.0, "mesh": 1.5, "ring": 1.0}), (4, {"direct": 2.0, "mesh": 1.0, "ring": 1.09}))
    assert [row.algorithm for row in rows] == ["ring"]
    rows = selected(2, (1, {"direct": 2.0, "ring": 1.0}), (4, {"direct": 1.09, "ring": 1.0}))
    assert [row.algorithm for row in rows] == ["ring", "direct"]


@pytest.mark.parametrize(
    "smallest, ranks, sizes",
    [
        (1024, 2, [1024, 4096, 16384]),
        (1024, 300, [1200, 4800, 16800]),
        (256, 3, [264, 1032, 4104, 16392]),
        (64, 1024, [4096, 16384]),
    ],
)
def test_sizes_are_rounded_up_to_what_the_ranks_can_divide(smallest, ranks, sizes):
    assert measured_sizes(smallest, 16 << 10, ranks) == sizes
