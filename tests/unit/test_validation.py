"""JSON from outside: numbers that it does not have, and a byte order mark."""

import pytest

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.validation import json_of, strict_json
from mlxdist.cluster.hostfile.parsing import parse
from mlxdist.nn import Plan
from mlxdist.nn.pipeline_parallel.stage_plan import StagePlan
from mlxdist.serve.limits import parse_body
from mlxdist.serve.refusal import Refusal

READERS = {
    "json_of": (lambda text: json_of(text, 1 << 10), ValueError),
    "strict_json": (strict_json, ValueError),
    "hostfile": (lambda text: parse(text.decode()), InvalidArgument),
    "Plan": (lambda text: Plan.from_json(text.decode()), InvalidArgument),
    "StagePlan": (lambda text: StagePlan.from_json(text.decode()), InvalidArgument),
    "serve": (parse_body, Refusal),
}


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-Infinity"])
@pytest.mark.parametrize("reader", READERS)
def test_constants_that_json_does_not_have(reader, constant):
    read, error = READERS[reader]
    with pytest.raises(error, match="it is not JSON" if reader == "json_of" else "Infinity|NaN") as found:
        read(b'{"hosts": [%s]}' % constant)
    assert "is not a number of JSON" in str(found.value) or reader == "json_of"


@pytest.mark.parametrize("read", [lambda data: json_of(data, 1 << 10), strict_json])
def test_a_byte_order_mark(read):
    assert read('\ufeff{"a": 1}'.encode()) == {"a": 1}
