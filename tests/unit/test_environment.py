"""The MLXDIST_* variables: what is read, and what is refused with which advice."""

import os
import subprocess
import sys

import pytest

from mlxdist.base.environment import VARIABLES, Environment, format_address, parse_address
from mlxdist.base.errors import EnvironmentVariableError

SECRET = "ab" * 32
JOB = {"MLXDIST_RANK": "1", "MLXDIST_WORLD_SIZE": "4", "MLXDIST_RENDEZVOUS": "127.0.0.1:4711", "MLXDIST_SECRET": SECRET}


def test_nothing_set_is_a_world_of_one():
    environment = Environment.read({"PATH": "/bin"})
    assert (environment.rank, environment.world_size) == (0, 1)
    assert environment == Environment()


def test_a_job():
    environment = Environment.read(JOB | {"MLXDIST_JOB": "a.b", "MLXDIST_TIMEOUT": "2.5"})
    assert environment == Environment(
        rank=1, world_size=4, rendezvous=("127.0.0.1", 4711), secret=b"\xab" * 32, job="a.b", timeout=2.5
    )


def test_rank_0_gets_the_socket():
    environment = Environment.read(JOB | {"MLXDIST_RANK": "0", "MLXDIST_RENDEZVOUS_FD": "3"})
    assert environment.rendezvous_fd == 3


def test_settings_of_the_transport():
    environment = Environment.read(
        {
            "MLXDIST_BULK_SLOT_BYTES": "8192",
            "MLXDIST_BULK_SLOTS": "2",
            "MLXDIST_EAGER_SLOTS": "256",
            "MLXDIST_ON_DEMAND_THRESHOLD": "1",
            "MLXDIST_ALGO": "ring",
            "MLXDIST_PROVIDER": "ibverbs",
            "MLXDIST_DEVICE_MAP": '[[null, "rxe0"], ["rxe1", null]]',
            "MLXDIST_QP_TYPE": "rc",
            "MLXDIST_KEEPALIVE": "0.5",
            "MLXDIST_SOFT_PROFILE": "apple-tb5",
            "MLXDIST_SOFT_TRANSPORT": "tcp",
            "MLXDIST_INJECT_FAULTS": "1:drop=1/100,none,link=down",
            "MLXDIST_TIMEOUT": "0",
        }
    )
    assert (environment.bulk_slot_bytes, environment.bulk_slots, environment.eager_slots) == (8192, 2, 256)
    assert (environment.on_demand_threshold, environment.algo) == (1, "ring")
    assert (environment.soft_profile, environment.inject_faults) == ("apple-tb5", "1:drop=1/100,none,link=down")
    assert (environment.provider, environment.qp_type, environment.keepalive) == ("ibverbs", "rc", 0.5)
    assert (environment.device_map, environment.soft_transport) == ('[[null, "rxe0"], ["rxe1", null]]', "tcp")
    assert environment.timeout == 0


def test_variables_are_those_of_the_process_by_default(monkeypatch):
    monkeypatch.setenv("MLXDIST_BULK_SLOTS", "3")
    assert Environment.read().bulk_slots == 3


def test_the_secret_is_not_shown():
    assert "abab" not in repr(Environment.read(JOB)) and "\\xab" not in repr(Environment.read(JOB))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"MLXDIST_WORLD_SIZE": None}, ["MLXDIST_RANK=1", "MLXDIST_WORLD_SIZE is not", "set both"]),
        ({"MLXDIST_RANK": None}, ["MLXDIST_WORLD_SIZE=4", "MLXDIST_RANK is not", "set both"]),
        ({"MLXDIST_RANK": "4"}, ["MLXDIST_RANK=4", "MLXDIST_WORLD_SIZE=4", "0 to 3"]),
        ({"MLXDIST_RANK": "-1"}, ["MLXDIST_RANK='-1'", "whole number"]),
        ({"MLXDIST_RANK": "one"}, ["MLXDIST_RANK='one'", "whole number"]),
        ({"MLXDIST_RANK": ""}, ["MLXDIST_RANK=''", "whole number"]),
        ({"MLXDIST_RANK": "1\n"}, ["MLXDIST_RANK='1\\n'", "whole number"]),
        ({"MLXDIST_RANK": "١"}, ["MLXDIST_RANK", "whole number"]),
        ({"MLXDIST_WORLD_SIZE": "0"}, ["MLXDIST_WORLD_SIZE='0'", "from 1 to 256"]),
        ({"MLXDIST_WORLD_SIZE": "1" * 5000}, ["MLXDIST_WORLD_SIZE", "from 1 to 256"]),
        ({"MLXDIST_RENDEZVOUS": None}, ["MLXDIST_WORLD_SIZE=4", "MLXDIST_RENDEZVOUS", "host:port"]),
        ({"MLXDIST_RENDEZVOUS": "localhost"}, ["MLXDIST_RENDEZVOUS", "'localhost'", "host:port"]),
        ({"MLXDIST_RENDEZVOUS": "::1:4711"}, ["MLXDIST_RENDEZVOUS", "[address]:port"]),
        ({"MLXDIST_RENDEZVOUS": "a:65536"}, ["MLXDIST_RENDEZVOUS", "'a:65536'"]),
        ({"MLXDIST_SECRET": None}, ["MLXDIST_WORLD_SIZE=4", "MLXDIST_SECRET", "openssl rand"]),
        ({"MLXDIST_SECRET": "secret"}, ["MLXDIST_SECRET", "hex"]),
        ({"MLXDIST_SECRET": "ab"}, ["MLXDIST_SECRET", "32"]),
        ({"MLXDIST_RENDEZVOUS_FD": "3"}, ["MLXDIST_RENDEZVOUS_FD=3", "MLXDIST_RANK=1", "unset"]),
        ({"MLXDIST_FOLLOWER_FD": "3"}, ["MLXDIST_FOLLOWER_FD=3", "MLXDIST_RANK=1", "unset"]),
        ({"MLXDIST_RANK": None, "MLXDIST_WORLD_SIZE": None}, ["MLXDIST_RENDEZVOUS=127.0.0.1:4711", "MLXDIST_RANK"]),
        ({"MLXDIST_JOB": "a b"}, ["MLXDIST_JOB='a b'"]),
        ({"MLXDIST_TIMEOUT": "-1"}, ["MLXDIST_TIMEOUT='-1'", "seconds"]),
        ({"MLXDIST_TIMEOUT": "nan"}, ["MLXDIST_TIMEOUT='nan'", "seconds"]),
        ({"MLXDIST_TIMEOUT": "inf"}, ["MLXDIST_TIMEOUT='inf'", "seconds"]),
        ({"MLXDIST_RENDEZVOUS_TIMEOUT": "0"}, ["MLXDIST_RENDEZVOUS_TIMEOUT='0'", "above 0"]),
        ({"MLXDIST_BULK_SLOT_BYTES": "10000"}, ["MLXDIST_BULK_SLOT_BYTES='10000'", "multiple of 4096"]),
        ({"MLXDIST_BULK_SLOT_BYTES": "2048"}, ["MLXDIST_BULK_SLOT_BYTES='2048'", "4096"]),
        ({"MLXDIST_BULK_SLOTS": "65"}, ["MLXDIST_BULK_SLOTS='65'", "from 2 to 64"]),
        ({"MLXDIST_EAGER_SLOTS": "3"}, ["MLXDIST_EAGER_SLOTS='3'", "from 4 to 256"]),
        ({"MLXDIST_ON_DEMAND_THRESHOLD": "0"}, ["MLXDIST_ON_DEMAND_THRESHOLD='0'", "from 1 to 256"]),
        ({"MLXDIST_ALGO": "Ring"}, ["MLXDIST_ALGO='Ring'", "auto, direct, mesh, ring, recursive_doubling, tree"]),
        (
            {"MLXDIST_SOFT_PROFILE": "apple"},
            ["MLXDIST_SOFT_PROFILE='apple'", "ideal, apple-tb5, apple-tb5-26.2, apple-tb5-27, apple-odd, rxe"],
        ),
        ({"MLXDIST_INJECT_FAULTS": "drop=1/100, none"}, ["MLXDIST_INJECT_FAULTS='drop=1/100, none'", "list of faults"]),
        ({"MLXDIST_INJECT_FAULTS": ""}, ["MLXDIST_INJECT_FAULTS=''", "list of faults"]),
        ({"MLXDIST_LINKS_PER_PEER": "5"}, ["MLXDIST_LINKS_PER_PEER='5'", "from 1 to 4"]),
        ({"MLXDIST_TOPOLOGY": "0-1,1"}, ["MLXDIST_TOPOLOGY='0-1,1'", "pairs of ranks"]),
        ({"MLXDIST_TOPOLOGY": "0-4"}, ["MLXDIST_TOPOLOGY=0-4", "0 to 3"]),
        ({"MLXDIST_DEBUG": "loud"}, ["MLXDIST_DEBUG='loud'", "off, warn, info, trace"]),
        ({"MLXDIST_DEBUG": ""}, ["MLXDIST_DEBUG=''", "off, warn, info, trace"]),
        ({"MLXDIST_DEBUG": "info:lnik"}, ["no subsystem 'lnik'", "link"]),
        ({"MLXDIST_DEBUG": "info:"}, ["no subsystem ''"]),
        ({"MLXDIST_DEBUG_FILE": ""}, ["MLXDIST_DEBUG_FILE='' is empty"]),
        ({"MLXDIST_DEBUG_FILE": "a%x"}, ["MLXDIST_DEBUG_FILE='a%x'", "%h (host)"]),
        ({"MLXDIST_DEBUG_FILE": "100%"}, ["MLXDIST_DEBUG_FILE='100%'"]),
        ({"MLXDIST_FLIGHT_DIR": ""}, ["MLXDIST_FLIGHT_DIR='' is empty"]),
        ({"MLXDIST_TIMOUT": "3"}, ["MLXDIST_TIMOUT", "did you mean MLXDIST_TIMEOUT?"]),
        ({"MLXDIST_QUANTUM_FOAM": "3"}, ["MLXDIST_QUANTUM_FOAM", "no such variable"]),
    ],
)
def test_rejected(changes, words):
    environ = {name: value for name, value in (JOB | changes).items() if value is not None}
    with pytest.raises(EnvironmentVariableError) as caught:
        Environment.read(environ)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "text, address", [("h:1", ("h", 1)), ("[::1]:65535", ("::1", 65535)), ("1.2.3.4:80", ("1.2.3.4", 80))]
)
def test_addresses(text, address):
    assert parse_address(text) == address
    assert format_address(*address) == text


def test_the_table_has_every_variable_that_is_read():
    """A variable that is not in the table would be refused when it is set, so every field has to have one."""
    names = {variable.name.removeprefix("MLXDIST_").lower() for variable in VARIABLES}
    assert names == set(Environment.__dataclass_fields__)


def env_command(variables):
    command = [sys.executable, "-m", "mlxdist", "env"]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=30)


def test_env_command_shows_all_variables_but_not_the_secret():
    shown = env_command(JOB)
    assert shown.returncode == 0, shown.stderr
    assert all(variable.name in shown.stdout for variable in VARIABLES)
    assert SECRET not in shown.stdout


def test_env_command_names_a_contradiction():
    shown = env_command({"MLXDIST_RANK": "1"})
    assert shown.returncode == 2
    assert "MLXDIST_WORLD_SIZE is not" in shown.stderr
