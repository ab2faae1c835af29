"""A host is reached without ssh where its name means this machine, however the name is spelled, and only there."""

import shutil
import socket
import subprocess
import sys
import threading

import pytest

from mlxdist.cluster.ssh import this_machine
from mlxdist.cluster.ssh.this_machine import is_this_machine

HERE, ELSEWHERE = "127.0.0.1", "192.0.2.7"


@pytest.fixture
def on(monkeypatch):
    """A machine of that name, whose resolver knows these names; which addresses are bound is the system's word."""

    def become(hostname, **known):
        table = {name.replace("_", "."): addresses for name, addresses in known.items()}
        asked = []

        def look_up(host, port, type):
            asked.append(host)
            if host not in table:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            family = {True: socket.AF_INET6, False: socket.AF_INET}
            return [(family[":" in a], type, 0, "", (a, 0, 0, 0) if ":" in a else (a, 0)) for a in table[host]]

        monkeypatch.setattr(socket, "gethostname", lambda: hostname)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        forget()
        return asked

    yield become
    forget()


def forget():
    is_this_machine.cache_clear()
    this_machine._own_names.cache_clear()


@pytest.mark.parametrize("name", ["studio", "Studio", "STUDIO.local", "studio.local.", "ann@studio", "localhost"])
def test_a_mac_is_known_by_its_name_in_any_spelling(on, name):
    on("Studio.local")
    assert is_this_machine(name)


def test_its_own_name_is_not_looked_up(on):
    asked = on("Studio.local")
    assert is_this_machine("studio.local") and is_this_machine("ann@localhost") and asked == []


@pytest.mark.parametrize(
    ("hostname", "name"),
    [
        ("studio.a.com", "studio.b.com"),
        ("studio", "studio.b.com"),
        ("Studio.local", "studio.lab2"),  # an alias of ssh_config
        ("studio.a.com", "mini"),
        ("Studio.local", "studio-2"),
        ("Studio.local", "studio2.local"),
    ],
)
def test_other_names_without_an_address_are_other_machines(on, hostname, name):
    on(hostname)
    assert not is_this_machine(name)


def test_addresses_decide_where_there_are_some(on):
    known = {"studio": [ELSEWHERE], "alias_example": [HERE], "other_example": [ELSEWHERE]}
    on("Studio.local", **known, both_example=[HERE, ELSEWHERE])
    assert not is_this_machine("studio")  # of another domain that this one's resolver searches
    assert is_this_machine("alias.example") and not is_this_machine("other.example")
    assert not is_this_machine("both.example")  # several machines share the name


def test_addresses_of_no_interface(on):
    everywhere = ["0.0.0.0", "::", "224.0.0.1", "ff02::1"]
    on("mini", **{f"x{i}": [address] for i, address in enumerate(everywhere)})
    assert not any(is_this_machine(f"x{i}") for i in range(len(everywhere)))


def test_ipv6(on):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    on("mini", six=["::1"], foreign=["2001:db8::7"], both=["::1", HERE])
    assert is_this_machine("six") and is_this_machine("both") and not is_this_machine("foreign")


def test_a_resolver_that_does_not_respond_is_not_waited_for(on, monkeypatch):
    import threading

    on("mini")
    answers = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers.wait(60) and [])
    monkeypatch.setattr(this_machine, "_LOOKUP_SECONDS", 0.05)
    assert not is_this_machine("node1")
    answers.set()


def test_several_names_are_looked_up_at_once(on, monkeypatch):
    on("mini")
    together = threading.Barrier(3)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [] if together.wait(20) >= 0 else None)
    monkeypatch.setattr(this_machine, "_LOOKUP_SECONDS", 20)
    this_machine.look_up(["node1", "node2", "node3"])
    assert not together.broken
    assert not is_this_machine("node1")  # is known by now


def test_the_name_by_which_other_macs_find_this_one(on, monkeypatch, tmp_path):
    """gethostname() is what a router called it."""
    program = tmp_path / "scutil"
    program.write_text('#!/bin/sh\ntest "$*" = "--get LocalHostName" && echo Annes-Studio\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    on("dhcp-17.example.com")
    assert not is_this_machine("annes-studio.local")
    monkeypatch.setattr(sys, "platform", "darwin")
    forget()
    assert is_this_machine("annes-studio") and is_this_machine("Annes-Studio.local")
    program.unlink()
    forget()
    assert not is_this_machine("annes-studio") and is_this_machine("dhcp-17")


def in_a_network(*commands):
    """Runs a script in a network and under a hostname of its own."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("there is no unshare or no ip: apt-get install util-linux iproute2")
    if subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces")
    script = " && ".join(["ip link set lo up", "hostname Studio.local", *commands])
    return subprocess.run(["unshare", "--net", "--uts", "sh", "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_a_job_on_this_machine_by_all_its_names_needs_no_ssh():
    launch = f"{sys.executable} -m mlxdist launch --ssh /no/such/ssh --hosts"
    add = "ip address add 10.9.8.7/32 dev lo"
    done = in_a_network(add, *(f"{launch} {name} -- echo here" for name in ("studio", "10.9.8.7")))
    assert done.returncode == 0 and done.stdout == "[0 studio] here\n[0 10.9.8.7] here\n", done.stderr
    other = in_a_network(add, f"{launch} 10.9.8.6 -- echo here")
    assert other.returncode == 1 and "/no/such/ssh" in other.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="ip_nonlocal_bind is Linux's")
def test_a_system_that_binds_any_address():
    """Then what can be bound says nothing."""
    ask = "from mlxdist.cluster.ssh.this_machine import is_this_machine as f; print(f('10.9.8.6'), f('localhost'))"
    done = in_a_network("echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind", f'{sys.executable} -c "{ask}"')
    if "Read-only file system" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("this machine's settings cannot be changed")
    assert done.stdout == "False True\n", done.stderr
