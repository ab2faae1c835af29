"""JSON from outside: numbers that it does not have or that are not finite, names that are twice, a byte order mark."""

import ast
import json
import math
from pathlib import Path

import pytest
from click import ClickException
from hypothesis import given
from hypothesis import strategies as st

import mlxdist
from mlxdist.base import tuning_file
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json, parse_located
from mlxdist.cluster.hostfile import device_map
from mlxdist.cluster.hostfile.parsing import parse
from mlxdist.cluster.ssh import protocol as ssh
from mlxdist.nn import Plan
from mlxdist.nn.pipeline_parallel.stage_plan import StagePlan
from mlxdist.runtime.diagnostics.flight_records import read_flight_record
from mlxdist.runtime.rendezvous import protocol as rendezvous
from mlxdist.runtime.rendezvous.heartbeat import unpack_peer_status
from mlxdist.serve import api
from mlxdist.serve.refusal import Refusal
from mlxdist.tools.bench import results
from mlxdist.train.checkpoint.files import Unusable
from mlxdist.train.checkpoint.manifest import Manifest

SOURCES = Path(mlxdist.__file__).parent
READERS = {
    "parse_json": (parse_json, ValueError),
    "parse_json of another program": (lambda text: parse_json(text, repeated=True), ValueError),
    "hostfile": (lambda text: parse(text.decode()), InvalidArgument),
    "device map": (device_map.parse, InvalidArgument),
    "Plan": (lambda text: Plan.from_json(text.decode()), InvalidArgument),
    "StagePlan": (lambda text: StagePlan.from_json(text.decode()), InvalidArgument),
    "manifest": (Manifest.from_text, Unusable),
    "ssh": (ssh.unpack_json, ssh.FrameError),
    "rendezvous": (rendezvous.unpack_json, rendezvous.ProtocolError),
    "peer status": (unpack_peer_status, rendezvous.ProtocolError),
    "serve": (lambda text: api.parse(text, api.CompletionRequest), Refusal),
}
FILES = {
    "flight record": (read_flight_record, InvalidArgument),
    "benchmark": (results.load, ClickException),
    "tuning": (lambda path: tuning_file.read_section(path, "hosts", dict, {}), InvalidArgument),
}
WRONG = {
    "NaN": "NaN is not a number of JSON",
    "Infinity": "Infinity is not a number of JSON",
    "-Infinity": "-Infinity is not a number of JSON",
    "1e999": "1e999 is not a finite number",
    "-1.5E+400": "-1.5E+400 is not a finite number",
    "9" * 5000: "a number has more than 4300 digits",
}


@pytest.mark.parametrize("number", WRONG)
@pytest.mark.parametrize("reader", READERS)
def test_numbers_that_json_does_not_have(reader, number):
    read, error = READERS[reader]
    with pytest.raises(error) as found:
        read(b'{"hosts": [%s]}' % number.encode())
    assert WRONG[number] in str(found.value)


@pytest.mark.parametrize("number", WRONG)
@pytest.mark.parametrize("reader", FILES)
def test_numbers_in_files(tmp_path, reader, number):
    read, error = FILES[reader]
    path = tmp_path / "flight-0.json"
    path.write_text(f'{{"hosts": [{number}]}}')
    with pytest.raises(error) as found:
        read(path)
    assert WRONG[number] in str(found.value) and str(path) in str(found.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("1e999", "1e999 is not a finite number (line 1, column 1)"),
        ('{"a": "1e999",\n "b": [1, -1e999]}', "-1e999 is not a finite number (line 2, column 11)"),
        ('["NaN\\"", "\\\\",\n\nNaN]', "NaN is not a number of JSON (line 3, column 1)"),
        ("[1e999-]", "1e999 is not a finite number (line 1, column 2)"),
        ('{"a": [1e9, {"b": 1,\n"b": 2}]}', "'b' is there twice in one object"),
        ('{"a": [1,\n}', "line 2, column 1: Expecting value"),
        (b'["\xff"]', "byte 2 is not UTF-8"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_the_message_says_where(text, place):
    with pytest.raises(ValueError) as found:
        parse_json(text)
    assert str(found.value) == place


def test_located_values_have_the_line_of_what_is_wrong():
    for number, problem in WRONG.items():
        with pytest.raises(ValueError) as found:
            parse_located(f'{{"a": 1,\n "b": [1,\n{number}]}}')
        assert str(found.value) == f"line 3: {problem}"


def test_names_that_are_twice():
    assert parse_json('{"a": 1, "b": 2, "a": 3}', repeated=True) == {"a": 3, "b": 2}


@pytest.mark.parametrize("read", [parse_json, lambda data: parse_json(data.decode())])
def test_a_byte_order_mark(read):
    assert read('\ufeff{"a": 1}'.encode()) == {"a": 1}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def is_finite(value):
    if isinstance(value, dict | list):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


@given(VALUES)
def test_the_rest_is_what_the_standard_library_reads(value):
    text = json.dumps(value, ensure_ascii=False)
    if is_finite(value):
        assert parse_json(text) == parse_located(text).plain() == value
    else:
        with pytest.raises(ValueError, match="is not a number of JSON"):
            parse_json(text)


def test_nothing_else_reads_json():
    found = {
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "json"
        and node.attr not in ("dumps", "dump")
        or isinstance(node, ast.ImportFrom)
        and node.module == "json"
    }
    assert found == {"base/json_reader.py"}
