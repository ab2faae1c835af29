"""MLXDIST_SYNC=1: errors of lazy operations are raised on the line of the program that calls them."""

import pytest

from mlxdist.runtime import synchronous
from mlxdist.runtime.native import bridge


@pytest.mark.parametrize("sync", ["0", "1"])
def test_operations_are_evaluated_where_they_are_called(run_ranks, sync):
    outputs = run_ranks("synchronous.py", 2, environment={"MLXDIST_SYNC": sync})
    assert all("as expected" in output for output in outputs)


def test_no_operation_of_the_bridge_is_forgotten():
    """Those that take a connection, as their signatures say; a recv with a token stays lazy."""
    connection = "connection: mlxdist._bridge.Connection"
    found = {name for name, value in vars(bridge).items() if connection in str(value.__doc__)}
    assert found == {*synchronous.OF_BRIDGE, "recv"}
