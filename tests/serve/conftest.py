"""Fixtures of the tests of HTTP: a server as in the launcher, before a rank 0 that does what a test says."""

import threading

import pytest


@pytest.fixture
def client():
    """A client of a server that has no rank 0 yet. After the test its thread has ended, and it listens no more."""
    from rank_zero import launcher_server

    with launcher_server() as client:
        yield client
    assert "mlxdist http" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(OSError):
        client.connect()


@pytest.fixture
def rank_0(client):
    """The rank 0 of that server, which is ready."""
    from rank_zero import started

    with started(client) as rank_0:
        yield rank_0
