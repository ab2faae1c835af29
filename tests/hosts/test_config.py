"""`mlxdist config`, the command, with Macs and Linux hosts that ssh reaches."""

import ipaddress
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from fake_macs import Macs
from ssh_hosts import ssh_hosts

from mlxdist.cli import commands
from mlxdist.cluster.hostfile.parsing import parse
from mlxdist.cluster.setup.addresses import RANGE
from mlxdist.cluster.setup.undo import UndoFile
from mlxdist.cluster.setup.verify import Check, problem


@pytest.fixture
def two_macs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "macs").mkdir()
    found = Macs(tmp_path / "macs")
    services = [["Wi-Fi", "Wi-Fi", "en0", True, "dhcp", ""], ["Own", "Thunderbolt 2", "en6", True, "dhcp", ""]]
    found.add("book", "m5_max_with_hub.json", "ports_m5_max.txt", bridge=["en1", "en6", "en2"])
    found.add("air", "m5_max_with_disk.json", "ports_m5_max.txt", services=services)
    return found


def config(reached, *words):
    return CliRunner().invoke(commands, ["config", *(["--ssh", reached.ssh] if reached else []), *words])


BOTH = ("--hosts", "book,air")


def test_set_up_once_and_taken_back(two_macs, tmp_path):
    before = [two_macs.read("book"), two_macs.read("air")]
    done = config(two_macs, *BOTH, "--auto-setup", "--verify", "--without-bridge")
    assert done.exit_code == 0, done.output
    assert "book: sudo networksetup -createnetworkservice 'mlxdist Thunderbolt 2' 'Thunderbolt 2'\n" in done.stdout
    assert "air: sudo networksetup -setmanual Own 10.111.0.2 255.255.255.252\n" in done.stdout
    assert "2 of 2 ways work" in done.stdout and "puts en6 back into bridge0" in done.stderr
    assert two_macs.read("book")["bridge"] == ["en1", "en2"]
    assert parse((tmp_path / "rmlx-hosts.json").read_text(), "x").hosts[0].rdma == ((), ("rdma_en6",))

    after = [two_macs.read("book"), two_macs.read("air")]
    again = config(two_macs, *BOTH, "--auto-setup", "--without-bridge")
    assert again.exit_code == 0 and "sudo" not in again.stdout and "(there already)" in again.stdout
    assert [two_macs.read("book"), two_macs.read("air")] == after

    shown = config(two_macs, "--undo", "--dry-run")
    assert shown.stdout.splitlines()[0] == "air: sudo networksetup -setdhcp Own"
    assert [two_macs.read("book"), two_macs.read("air")] == after
    back = config(two_macs, "--undo")
    assert back.exit_code == 0 and back.stdout == shown.stdout
    for now, then in zip([two_macs.read("book"), two_macs.read("air")], before):
        assert now | {"bridge": sorted(now["bridge"])} == then | {"bridge": sorted(then["bridge"])}
    assert not (tmp_path / "rmlx-hosts.undo.json").exists()
    assert "nothing was set up" in config(two_macs, "--undo").stderr


def test_dry_run(two_macs, tmp_path):
    before = two_macs.read("book")
    shown = config(two_macs, *BOTH, "--dry-run", "--dot", "x.dot", "--svg", "x.svg")
    assert shown.exit_code == 0 and "To be run:\n  book: sudo networksetup -create" in shown.stdout
    assert "1 cable, mesh" in shown.stdout and "en6 left in bridge0" in shown.stderr
    assert two_macs.read("book") == before and {path.name for path in tmp_path.iterdir()} == {"macs"}


def test_json_and_pictures(two_macs, tmp_path):
    done = config(two_macs, *BOTH, "--json", "--dot", "x.dot", "--svg", "x.svg", "--output-hostfile", "h.json")
    found = json.loads(done.stdout)
    assert found["shape"] == "mesh" and found["cables"][0]["ends"][0]["interface"] == "en6"
    assert found["steps"][0]["command"][0] == "networksetup" and found["hosts"][0]["wireless"]
    assert found["hostfile"] == json.loads((tmp_path / "h.json").read_text())
    assert (tmp_path / "x.dot").read_text().startswith("graph G") and "<svg" in (tmp_path / "x.svg").read_text()
    alone = config(two_macs, *BOTH, "--dot")  # as mlx.distributed_config has it
    assert alone.stdout.startswith("graph G {") and not (tmp_path / "rmlx-hosts.json").exists()


def test_hosts_that_do_not_respond(two_macs, tmp_path):
    done = config(two_macs, "--hosts", "book,nowhere,air")
    assert (
        done.exit_code == 1
        and "nowhere does not respond: ssh: Could not resolve hostname nowhere; try: ssh" in done.stderr
    )
    assert not (tmp_path / "rmlx-hosts.json").exists()
    done = config(two_macs, "--hosts", "book,nowhere,air", "--ignore-unreachable", "--output", "-")
    assert done.exit_code == 0 and [h.name for h in parse(done.stdout, "x").hosts] == ["book", "air"]


def test_sudo_that_asks_for_a_password(two_macs, tmp_path):
    two_macs.write("air", two_macs.read("air") | {"sudo": False})
    done = config(two_macs, *BOTH, "--auto-setup")
    assert done.exit_code == 1
    command = f"{two_macs.ssh} -t air 'sudo networksetup -setmanual Own 10.111.0.2 255.255.255.252'"
    assert f"air needs a password for sudo; type: {command}" in done.stderr
    assert two_macs.read("book")["addresses"]["en6"] == "10.111.0.1/255.255.255.252"  # the other host is set up
    assert (tmp_path / "rmlx-hosts.json").exists()


def test_a_step_that_fails(two_macs, tmp_path):
    two_macs.write(
        "air", two_macs.read("air") | {"ports": two_macs.read("air")["ports"].replace("Port: Thunderbolt 2", "Port: X")}
    )
    two_macs.write("book", two_macs.read("book") | {"ports": "Hardware Port: Thunderbolt 2\nDevice: en6\n"})
    assert "air has no network interface for Thunderbolt 2" in config(two_macs, *BOTH, "--dry-run").stderr
    undo = tmp_path / "rmlx-hosts.undo.json"
    undo.write_text(
        '{"mlxdist undo": 1, "steps": [["book", "set dhcp", "Gone"], ["book", "delete connection", "Own"], '
        '["air", "enable service", "Gone"], ["air", "set dhcp", "Own"]]}'
    )
    done = config(two_macs, "--undo")
    assert done.exit_code == 1 and "-setnetworkserviceenabled Gone on` failed: Gone is not a recognized" in done.stderr
    assert "book: sudo networksetup -setdhcp Gone (not needed any more)" in done.stdout
    # To be tried again; what does not depend on it was done.
    assert {step.values for step in UndoFile(undo).steps} == {("Own",), ("Gone",)}
    assert "air: sudo networksetup -setdhcp Own\n" in done.stdout


def test_undo_after_the_system_has_undone_some(two_macs, tmp_path):
    """macOS puts a port back into the bridge at a restart; the user has removed the service."""
    assert config(two_macs, *BOTH, "--auto-setup", "--without-bridge").exit_code == 0
    book = two_macs.read("book")
    services = [service for service in book["services"] if not service[0].startswith("mlxdist")]
    two_macs.write("book", book | {"bridge": ["en1", "en2", "en6"], "services": services})
    done = config(two_macs, "--undo")
    assert done.exit_code == 0 and done.stdout.count("not needed any more") == 2, done.output
    assert two_macs.read("air")["addresses"]["en6"] == "" and not (tmp_path / "rmlx-hosts.undo.json").exists()


def test_a_step_whose_connection_is_lost_can_be_taken_back(two_macs, tmp_path):
    ssh = tmp_path / "cutting-ssh"
    ssh.write_text(f'#!/bin/sh\n{two_macs.ssh} "$@" || exit\ncase "$*" in *setmanual*) exit 255 ;; esac\n')
    ssh.chmod(0o700)
    done = CliRunner().invoke(commands, ["config", "--ssh", str(ssh), *BOTH, "--auto-setup"])
    assert done.exit_code == 1 and two_macs.read("air")["addresses"]["en6"]
    assert ("Own",) in [step.values for step in UndoFile(tmp_path / "rmlx-hosts.undo.json").steps]


def test_what_is_not_understood_is_reported_for_the_host(two_macs):
    two_macs.write("air", two_macs.read("air") | {"thunderbolt": "killed"})
    done = config(two_macs, *BOTH, "--dry-run")
    assert "air: what system_profiler says of Thunderbolt is not understood" in done.stderr
    assert config(two_macs, *BOTH, "--over", "ethernet", "--dry-run").exit_code == 0


def test_verify_reports_what_does_not_work(two_macs):
    done = config(two_macs, *BOTH, "--verify")
    assert done.exit_code == 1 and "0 of 2 ways work" in done.stdout
    assert "air does not reach 10.111.0.1 of book by en6: look at the cable" in done.stderr
    assert (
        "book does not reach 10.111.0.2 of air by en6: en6 is a member of bridge0; run this again with" in done.stderr
    )


@pytest.mark.parametrize(
    ("response", "words"),
    [(("yes", "en2"), ""), (("yes", ""), ""), (("yes", "en9"), "by en9, not by en2"), (("no", ""), "does not reach")],
)
def test_the_way_to_a_peer(response, words):
    found = problem(Check("a", "b", "10.111.0.2", "en2"), *response)
    assert words in found and bool(found) == bool(words)


def test_a_hostfile_that_is_replaced_is_kept(two_macs, tmp_path):
    (tmp_path / "rmlx-hosts.json").write_text("mine")
    done = config(two_macs, *BOTH)
    assert done.exit_code == 0 and "is now rmlx-hosts.json.old" in done.stderr
    assert (tmp_path / "rmlx-hosts.json.old").read_text() == "mine"


def test_other_entries_of_a_hostfile_are_kept(two_macs, tmp_path):
    entries = [{"ssh": "book", "slots": 2}, {"ssh": "air"}]
    settings = ["A=1", "B=2", "MLXDIST_TOPOLOGY=0-1"]
    (tmp_path / "rmlx-hosts.json").write_text(json.dumps({"backend": "ring", "envs": settings, "hosts": entries}))
    assert config(two_macs, "--hostfile", "rmlx-hosts.json", "--env", "B=3").exit_code == 0
    found = parse((tmp_path / "rmlx-hosts.json").read_text(), "x")
    assert found.backend == "ring" and found.envs == ("A=1", "B=3") and found.hosts[0].slots == 2
    assert config(two_macs, "--hostfile", "rmlx-hosts.json", "--backend", "mlxdist").exit_code == 0
    assert parse((tmp_path / "rmlx-hosts.json").read_text(), "x").backend == "mlxdist"


def test_an_output_that_cannot_be_written(two_macs):
    before = two_macs.read("book")
    done = config(two_macs, *BOTH, "--auto-setup", "--output", "no/such/hosts.json")
    assert done.exit_code == 2 and "No such file" in done.stderr and isinstance(done.exception, SystemExit)
    assert two_macs.read("book") == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Give --hosts A,B"),
        (("--hosts", "a", "--range", "10.0.0.1/8"), "--range 10.0.0.1/8: 10.0.0.1/8 has host bits set"),
        (("--hosts", "a", "--env", "x y"), "--env: 'x y' sets no environment variable"),
        (("--hosts", "a", "--over", "ethernet", "--backend", "jaccl"), "needs cables"),
        (("--hosts", "a", "--auto-setup", "--dry-run"), "--dry-run runs none"),
        (("--hosts", "localhost", "--dry-run"), "Linux does not report which cable leads where"),
    ],
)
def test_what_is_rejected(words, said):
    done = config(None, *words)
    assert done.exit_code != 0 and said in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux")
def test_this_machine_over_ethernet():
    done = config(None, "--hosts", "localhost", "--over", "ethernet", "--output", "-")
    assert [h.name for h in parse(done.stdout, "x").hosts] == ["localhost"], done.stderr


@pytest.fixture
def linux(tmp_path):
    """Two hosts with a network, and a cable between them that has no addresses."""
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(tmp_path / "ssh") as found:
        a, b = (host.namespace for host in found.hosts[:2])
        subprocess.run(
            ["ip", "link", "add", "cable0", "netns", a, "type", "veth", "peer", "name", "cable0", "netns", b],
            check=True,
        )
        yield found


def config_on(hosts, directory, *words):
    command = hosts.command(sys.executable, "-m", "mlxdist", "config", "--ssh", hosts.ssh, *words)
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


def addresses_on(hosts):
    shown = [["ip", "-n", host.namespace, "-json", "addr", "show", "cable0"] for host in hosts.hosts[:2]]
    found = [json.loads(subprocess.run(words, capture_output=True, check=True).stdout)[0] for words in shown]
    return [("UP" in f["flags"], [a["local"] for a in f["addr_info"] if a["family"] == "inet"]) for f in found]


@pytest.mark.long
def test_linux_over_ethernet(linux, tmp_path):
    names = ",".join(linux.names[:2])
    done = config_on(linux, tmp_path, "--hosts", names, "--over", "ethernet", "--verify")
    assert done.returncode == 0, done.stderr
    found = parse((tmp_path / "rmlx-hosts.json").read_text(), "x")
    assert [h.ips for h in found.hosts] == [(host.address,) for host in linux.hosts[:2]]
    assert "2 of 2 ways work" in done.stdout
    linux.hosts[1].pull_cable()
    done = config_on(linux, tmp_path, "--hosts", names, "--over", "ethernet", "--verify")
    assert done.returncode == 1 and f"{linux.names[1]} does not respond" in done.stderr


@pytest.mark.long
def test_linux_cables(linux, tmp_path):
    a, b = linux.names[:2]
    words = ["--hosts", f"{a},{b}", "--cable", f"{a}:cable0={b}:cable0"]
    before = addresses_on(linux)
    assert before == [(False, []), (False, [])]
    done = config_on(linux, tmp_path, *words, "--auto-setup", "--verify")
    assert done.returncode == 0 and "2 of 2 ways work" in done.stdout, done.stdout + done.stderr
    assert addresses_on(linux) == [(True, ["10.111.0.1"]), (True, ["10.111.0.2"])]
    again = config_on(linux, tmp_path, *words, "--auto-setup")
    assert again.returncode == 0 and "sudo" not in again.stdout and "(there already)" in again.stdout
    back = config_on(linux, tmp_path, "--undo")
    assert back.returncode == 0 and addresses_on(linux) == before, back.stderr


def test_the_range_that_is_documented():
    from mlxdist.cli import config as command

    assert ipaddress.IPv4Network(command._RANGE) == RANGE
