"""Hostfiles: every format read, shown and written, and whatever is wrong said with its line."""

import datetime
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.base.errors import InvalidArgument
from mlxdist.cli import commands
from mlxdist.cluster.hostfile.hosts import FORMATS, Host, Hostfile
from mlxdist.cluster.hostfile.parsing import parse, read
from mlxdist.cluster.hostfile.slurm import expand, from_slurm, tasks_per_node
from mlxdist.cluster.hostfile.writing import write

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "rmlx-hosts.example.json"


def run(*arguments, **keywords):
    return CliRunner().invoke(commands, ["hostfile", *arguments], **keywords)


def hosts(*names, **keywords):
    return tuple(Host(name, **keywords) for name in names)


def test_the_example():
    found = read(EXAMPLE)
    assert found.backend == "mlxdist" and found.envs == ("MLX_METAL_FAST_SYNCH=0",) and found.warnings == ()
    assert [(host.name, host.ips, host.rdma) for host in found.hosts] == [
        ("node0", ("192.168.0.1",), ((), ("rdma_en5",))),
        ("node1", ("192.168.0.2",), (("rdma_en5",), ())),
    ]


def test_mlx_reads_what_is_written():
    """MLX's own reader, on the example and on what conversion makes of it."""
    common = pytest.importorskip("mlx._distributed_utils.common")
    found = common.Hostfile.from_file(str(EXAMPLE))
    assert json.loads(write(read(EXAMPLE), "json"))["hosts"] == found.to_json()["hosts"]
    assert [host.ssh_hostname for host in found.hosts] == [host.name for host in read(EXAMPLE).hosts]


@pytest.mark.parametrize(
    "text, format, slots",
    [
        ("a\nb\n", "slots", {"a": 1, "b": 1}),
        ("# two\na slots=2 # here\n\nb   slots=3 max_slots=4\n", "slots", {"a": 2, "b": 3}),
        ("a max-slots=4", "slots", {"a": 1}),
        ("a:2\nb:4", "colon", {"a": 2, "b": 4}),
        ("user@a slots=2\nb", "slots", {"user@a": 2, "b": 1}),
        ("[fe80::1%en0]:3\nfe80::2\n", "slots", {"fe80::1%en0": 3, "fe80::2": 1}),
        ('[{"ssh": "a"}, {"ssh": "b", "slots": 2}]', "json", {"a": 1, "b": 2}),
        ('{"hosts": [{"ssh": "a", "ips": ["10.0.0.1"]}], "envs": [], "backend": ""}', "json", {"a": 1}),
        ('[["10.0.0.1:5000"], ["[fe80::1]:5001"]]', "ring", {"10.0.0.1": 1, "fe80::1": 1}),
    ],
)
def test_formats(text, format, slots):
    found = parse(text)
    assert found.format == format
    assert {host.name: host.slots for host in found.hosts} == slots and found.ranks == sum(slots.values())


def test_a_hostfile_for_the_ring_of_mlx_is_used_for_mlxdist():
    """Not every host reaches those addresses, where there are more than two."""
    entries = [{"ssh": name, "ips": [f"10.0.0.{i}"]} for i, name in enumerate("abc")]
    ring = parse(json.dumps({"backend": "ring", "hosts": entries}))
    assert [host.ips for host in ring.for_mlxdist().hosts] == [()] * 3
    assert [host.ips for host in ring.only("ab").for_mlxdist().hosts] == [("10.0.0.0",), ("10.0.0.1",)]
    jaccl = replace(ring, backend="jaccl").for_mlxdist()
    assert jaccl.backend == "mlxdist" and jaccl.hosts == ring.hosts


def test_one_rank_each():
    settings = ["MLXDIST_TOPOLOGY=0-1,1-2,2-3,3-4,4-5,5-0", "A=1"]
    entries = [{"ssh": name, "slots": 2} for name in "abc"]
    found = parse(json.dumps({"envs": settings, "hosts": entries})).with_one_rank_each()
    assert [host.slots for host in found.hosts] == [1] * 3 and found.envs == ("MLXDIST_TOPOLOGY=0-1,1-2,2-0", "A=1")


def test_json_may_repeat_a_host_for_each_of_its_ranks():
    found = parse('[{"ssh": "a"}, {"ssh": "a"}, {"ssh": "b"}]')
    assert found.ranks == 3 and write(found, "slots") == "a slots=2\nb slots=1\n"
    apart = parse('[{"ssh": "a"}, {"ssh": "b"}, {"ssh": "a"}]')
    with pytest.raises(InvalidArgument, match="the ranks of a do not follow each other"):
        write(apart, "slots")


@pytest.mark.parametrize(
    "text, messages",
    [
        ("", ["line 1: there is no host in it"]),
        ("# nothing\n", ["line 1: there is no host in it"]),
        ("a\nb\na slots=3", ["line 3: a is there twice, first in line 1; write it once, with 4 slots"]),
        ("a slots=0", ["line 1: slots are a number from 1 to 256, not '0'"]),
        ("a slots=two", ["line 1: slots are a number from 1 to 256, not 'two'"]),
        ("a:x", ["line 1: slots are a number from 1 to 256, not 'x'"]),
        ("a:2 slots=3", ["line 1: 'slots=3': the number of slots is there twice"]),
        ("me@a:22", ["line 1: 'me@a:22': is 22 a number of ranks or the port of ssh? For ranks write `me@a slots=22`"]),
        ('[{"ssh": "me@a:22"}]', ["line 1: 'me@a:22' has a port; write it in ~/.ssh/config (Port 22)"]),
        ("a gpu", ["line 1: 'gpu' is not understood; write `host slots=N`, one host to a line"]),
        ("-oProxyCommand=x", ["line 1: '-oProxyCommand=x' is no name or address of a host"]),
        ("a\nb;rm slots=1", ["line 2: 'b;rm' is no name"]),
        ("a slots=200\nb slots=100", ["line 2: 300 ranks; at most 256 are possible"]),
        ('{\n"hosts": 3}', ['line 2: "hosts" must be a list of hosts']),
        ("[]", ["line 1: there is no host in it"]),
        ("null\n", ['line 1: "hosts" must be a list of hosts']),
        ("[null]\n", ["line 1: a host is an object such as"]),
        ('[["10.0.0.1:٥٠٠"]]', ["line 1: '10.0.0.1:٥٠٠' is no address"]),
        ("3", ['line 1: "hosts" must be a list of hosts']),
        ('\n"a"', ['line 2: "hosts" must be a list of hosts']),
        (
            '[["10.0.0.1:70000"],\n["10.0.0.2:0"]]',
            ["line 1: '10.0.0.1:70000': a port is a number from 1 to 65535", "line 2: '10.0.0.2:0': a port is"],
        ),
        ('[{"ssh": "a"},\n{"ssh": "b",}]', ["line 2, column 13: "]),
        ('[{"ssh": "a",\n"ssh": "b"}]', ["line 2: 'ssh' is there twice, first in line 1"]),
        ("[" * 100_000, ["line 1: it is nested too deeply"]),
        ('[\n{"ips": []},\n3]', ['line 2: this host has no "ssh"', "line 3: a host is an object"]),
        ('[{"ssh": "a",\n"ips": ["10.0.0.1",\n"en5"]}]', ["line 3: \"ips\": 'en5' is no IP address"]),
        ('[{"ssh": "a", "ips": "10.0.0.1"}]', ['line 1: "ips" must be a list of texts']),
        ('{"hosts": [{"ssh": "a"}],\n"envs": ["A=1", "B"]}', ["line 2: \"envs\": 'B' sets no environment variable"]),
        ('{"backend": "tcp", "hosts": [{"ssh": "a"}]}', ["line 1: \"backend\" is 'tcp'; it can be any, auto"]),
        ('[{"ssh": "a", "slots": true}]', ["line 1: slots are a number from 1 to 256, not True"]),
        (
            '[["10.0.0.1:5000"],\n["10.0.0.1"], []]',
            ["line 2: '10.0.0.1' is no address such as", "line 2: a rank without"],
        ),
        (
            '[{"ssh": "a", "rdma": [null, "en2"]},\n{"ssh": "b",\n"rdma": [null, null, null]}]',
            ['line 3: "rdma": the row of host 1 (b) has 3 entries, but there are 2 hosts'],
        ),
        (
            '[{"ssh": "a", "rdma": ["en2", "en2"]},\n{"ssh": "b", "rdma": ["en2", null]}]',
            ['line 1: "rdma": host 0 (a), column 0: en2 would lead from the host to itself'],
        ),
        (
            '[{"ssh": "a", "rdma": [null, "en2"]},\n{"ssh": "b", "rdma": [null, null]}]',
            ['line 1: "rdma": host 0 (a) has a cable to host 1 (b) (en2), but host 1 (b) has null in column 0'],
        ),
        ('[{"ssh": "a", "rdma": [null, "x"]},\n{"ssh": "b"}]', ['line 2: "rdma": host 1 (b) has no row']),
    ],
)
def test_every_problem_is_reported_with_its_line(text, messages):
    with pytest.raises(InvalidArgument) as refused:
        parse(text, "hosts.json")
    lines = str(refused.value).split("\n")
    assert len(lines) == len(messages), lines
    for line, message in zip(lines, messages):
        assert line.startswith(f"hostfile hosts.json, {message}"), line


def test_a_file_full_of_errors_ends_somewhere():
    with pytest.raises(InvalidArgument) as refused:
        parse("\n".join(f"host{i} slots=0" for i in range(100)))
    assert len(str(refused.value).split("\n")) == 21 and str(refused.value).endswith("... and 80 more")


@pytest.mark.parametrize(
    "content, message",
    [(None, "No such file"), (b"a\n\xff\n", "line 2: byte 2 is not UTF-8"), (b" " * (17 << 20), "bytes")],
)
def test_a_file_that_cannot_be_read(tmp_path, content, message):
    if content is not None:
        (tmp_path / "hosts").write_bytes(content)
    with pytest.raises(InvalidArgument, match=message):
        read(tmp_path / "hosts")


def test_unknown_names_are_warned_of():
    found = parse('{"hosts": [\n{"ssh": "a", "ip": ["10.0.0.1"]}], "comment": 1}')
    assert found.warnings == (
        "line 2: 'comment' is not known and changes nothing; known are backend, envs, hosts",
        "line 2: 'ip' is not known and changes nothing; did you mean 'ips'?",
    )


NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@st.composite
def hostfiles(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    count = len(names)
    cables = {pair: draw(st.integers(0, 2)) for pair in ((i, j) for i in range(count) for j in range(i))}

    def devices(i, j):
        return tuple(f"en{j}{k}" for k in range(cables.get((max(i, j), min(i, j)), 0)))

    rows = [tuple(devices(i, j) for j in range(count)) for i in range(count)]
    entries = []
    for name, row in zip(names, rows):
        ips = draw(st.lists(st.ip_addresses().map(str), max_size=2))
        denied = draw(st.sampled_from(["", '2026-11-30: it says "no"']))
        entries.append(
            Host(name, draw(st.integers(1, 8)), tuple(ips), row if any(cables.values()) else (), denied=denied)
        )
    envs = draw(st.lists(st.from_regex(r"[A-Z_]{1,5}=[^\0\ud800-\udfff]{0,5}", fullmatch=True), max_size=2))
    return Hostfile(tuple(entries), draw(st.sampled_from(["", "ring", "mlxdist"])), tuple(envs))


@settings(deadline=None)
@given(hostfiles())
def test_what_is_written_is_read_again(found):
    again = parse(write(found, "json"))
    assert [replace(host, line=0) for host in again.hosts] == list(found.hosts)
    assert (again.backend, again.envs) == (found.backend, found.envs)
    plain = Hostfile(tuple(Host(host.name, host.slots) for host in found.hosts))
    for format in ("slots", "colon"):
        again = parse(write(plain, format))
        assert [(h.name, h.slots) for h in again.hosts] == [(h.name, h.slots) for h in plain.hosts]


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_format_cannot_express_is_an_error(format):
    found = read(EXAMPLE)
    if format == "json":
        assert parse(write(found, format)).envs == found.envs
    elif format == "ring":
        assert json.loads(write(found, format)) == [["192.168.0.1:32323"], ["192.168.0.2:32324"]]
        with pytest.raises(InvalidArgument, match="a has no IP address, and a ring needs one"):
            write(Hostfile(hosts("a")), format)
    else:
        with pytest.raises(InvalidArgument, match="no place for a backend, environment variables, devices of cables"):
            write(found, format)


# What `scontrol show hostnames` makes of lists; the shapes are those of SLURM's documentation of hostlists.
LISTS = {
    "a": ["a"],
    "a,b": ["a", "b"],
    "n[7-8]": ["n7", "n8"],
    "n[08-11]": ["n08", "n09", "n10", "n11"],
    "node-[21,23-26]": ["node-21", "node-23", "node-24", "node-25", "node-26"],
    "node-[021,9-10]": ["node-021", "node-9", "node-10"],
    "a,n[1-2],login": ["a", "n1", "n2", "login"],
    "rack[1-2]n[01-02]": ["rack1n01", "rack1n02", "rack2n01", "rack2n02"],
    "n[1-2]-ib,m[3]": ["n1-ib", "n2-ib", "m3"],
    "n[98-101]": ["n98", "n99", "n100", "n101"],
}


@pytest.mark.parametrize("nodes", LISTS)
def test_slurm_lists(nodes):
    assert expand(nodes) == LISTS[nodes]


@pytest.mark.parametrize(
    "nodes, message",
    [
        ("", "a name is missing"),
        ("a,", "a name is missing"),
        ("n[1-2", "a ] is missing"),
        ("n]1", "unexpected ']' at letter 2"),
        ("n[[1]]", "unexpected"),
        ("n[]", "'' is neither a number nor a range"),
        ("n[a-b]", "'a-b' is neither"),
        ("n[1-]", "'1-' is neither"),
        ("n[5-3]", "'5-3' goes backwards"),
        ("n[1-2000]", "more than 256 hosts"),
        ("n[0-9][0-9][0-9][0-9][0-9][0-9]", "more than 256 hosts"),
        ("n[1-99999999999999999999]", "neither a number nor a range"),
        ("-oProxy", "is no name or address"),
    ],
)
def test_what_is_no_slurm_list(nodes, message):
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        expand(nodes)


def test_slurm_tasks():
    assert tasks_per_node("4", 1) == [4]
    assert tasks_per_node("2(x3),1", 4) == [2, 2, 2, 1]
    refused = {"2(x3)": "is for 3 hosts, but there are 4", "2,x": "'x' is no number", "9(x9999999)": "more than 256"}
    for tasks, message in refused.items():
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            tasks_per_node(tasks, 4)


def test_from_slurm():
    found = from_slurm({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"})
    assert [(host.name, host.slots) for host in found.hosts] == [("n1", 2), ("n2", 2)]
    assert from_slurm({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}, slots=3).ranks == 6
    with pytest.raises(InvalidArgument, match="this is no SLURM allocation"):
        from_slurm({})
    with pytest.raises(InvalidArgument, match="n1 is there twice"):
        from_slurm({"SLURM_JOB_NODELIST": "n1,n1"})


def test_check_ends_with_a_status(tmp_path):
    bad = tmp_path / "hosts"
    bad.write_text("a\na\n")
    assert run("check", str(EXAMPLE)).exit_code == 0
    refused = run("check", str(bad))
    assert refused.exit_code == 2 and f"hostfile {bad}, line 2: a is there twice" in refused.output


def test_show_as_json():
    shown = json.loads(run("show", "--json", str(EXAMPLE)).output)
    assert shown["ranks"] == 2 and shown["hosts"][1]["rdma"] == [["rdma_en5"], []] and shown["hosts"][1]["line"] == 6


def test_convert_writes_a_file(tmp_path):
    output = tmp_path / "hosts.json"
    assert run("convert", "-", "--to", "json", "--output", str(output), input="a slots=2\nb\n").exit_code == 0
    assert [(host.name, host.slots) for host in read(output).hosts] == [("a", 2), ("b", 1)]
    refused = run("convert", "-", "--to", "ring", input="a\n")
    assert refused.exit_code == 2 and "a has no IP address" in refused.output


def test_the_ports_of_a_ring_are_kept_or_left_out_with_a_word():
    ring = '[["10.0.0.1:5000", "10.0.0.1:5001"], ["10.0.0.2:5000", "[fe80::2]:7"]]'
    kept = run("convert", "-", "--to", "ring", input=ring)
    assert (json.loads(kept.stdout), kept.stderr) == (json.loads(ring), "")
    left_out = run("convert", "-", "--to", "json", input=ring)
    assert left_out.exit_code == 0 and "5000" not in left_out.stdout
    assert "left out, for json has no place for it: the ports" in left_out.stderr


def test_a_ring_is_written_with_a_word_on_what_it_lacks():
    converted = run("convert", str(EXAMPLE), "--to", "ring")
    assert json.loads(converted.stdout) == [["192.168.0.1:32323"], ["192.168.0.2:32324"]]
    lost = "left out, for ring has no place for it: a backend, environment variables, devices of cables, names for ssh"
    assert lost in converted.stderr
    plain = run("convert", "-", "--to", "ring", input='[{"ssh": "10.0.0.1", "ips": ["10.0.0.1"]}]')
    assert (json.loads(plain.stdout), plain.stderr) == ([["10.0.0.1:32323"]], "")


def test_a_user_stays_in_every_format_that_can_say_it():
    found = parse("me@a slots=2")
    assert parse(write(found, "slots")).hosts == found.hosts
    with pytest.raises(InvalidArgument, match="colon has no place for users of ssh"):
        write(found, "colon")


def test_ranks_of_each_host_agree_with_its_slots():
    """`--gpus 4` beside `host:4` are four ranks on a host, as is either alone."""
    assert parse("a:4\nb").with_ranks(4).ranks == 8
    assert parse("a\nb").with_ranks(3).ranks == 6
    with pytest.raises(InvalidArgument, match=r"^-n 2 .* hosts.txt gives a 4 slots; leave -n out for .* 5 in all"):
        parse("a:4\nb", "hosts.txt").with_ranks(2)


@pytest.mark.parametrize("text", ["a slots=2\nb\n", "a:2\nb:1\n", '[{"ssh": "a", "slots": 2}, {"ssh": "b"}]'])
def test_a_byte_order_mark_is_none_of_the_first_name(tmp_path, text):
    (tmp_path / "hosts").write_text(text, encoding="utf-8-sig")
    assert [host.name for host in read(tmp_path / "hosts").hosts] == ["a", "b"]


def test_the_examples_of_the_page(tmp_path, monkeypatch):
    """docs/hostfiles.md: every command is run, and prints what is shown."""
    page = (ROOT / "docs" / "hostfiles.md").read_text()
    examples = re.findall(r"^    \$ mlxdist (hostfile .*)\n((?:    (?!\$).*\n)*)", page, re.MULTILINE)
    assert len(examples) >= 5
    (tmp_path / "rmlx-hosts.json").write_text(EXAMPLE.read_text())
    (tmp_path / "hosts.txt").write_text("studio slots=2\nmini\nmini slots=x\n")
    for command, shown in examples:
        ended = subprocess.run(
            [sys.executable, "-m", "mlxdist", *shlex.split(command)],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
        printed = "\n".join(line.rstrip() for line in ended.stdout.splitlines())
        assert printed == re.sub(r"^    ", "", shown, flags=re.MULTILINE).rstrip("\n"), command


def test_the_example_sets_nothing_that_doctor_warns_of():
    example = read(EXAMPLE)
    assert example.warnings == () and example.ranks == 2 and example.hosts[0].rdma
    # With this variable and two ranks on a Mac, GPUs have locked up.
    assert "MLX_METAL_FAST_SYNCH=1" not in example.envs


def test_a_denied_host(tmp_path):
    file = tmp_path / "hosts.json"
    rows = [[None, "a0", "a1"], ["b0", None, "b1"], ["c0", "c1", None]]
    entries = [{"ssh": name, "ips": [], "rdma": row} for name, row in zip("abc", rows)]
    file.write_text(json.dumps({"hosts": entries}))
    assert run("deny", str(file), "b", "--reason", "its GPU resets").exit_code == 0
    today = datetime.date.today().isoformat()
    assert [host.denied for host in read(file).hosts] == ["", f"{today}: its GPU resets", ""]
    shown = run("show", str(file)).output
    assert f"{today}: its GPU resets" in shown and "denied since" in shown

    def dry_run(*options):
        words = ["launch", "--hostfile", str(file), *options, "--dry-run", "--", "true"]
        return CliRunner().invoke(commands, words)

    left = dry_run()
    assert left.exit_code == 0, left.output
    assert f"b is left out: denied since {today}: its GPU resets; --include names it all the same" in left.output
    assert 'MLXDIST_DEVICE_MAP=[[null, ["a1"]], [["c0"], null]]' in left.output.replace("\\", ""), left.output
    named = dry_run("--include", "a,b")
    assert named.exit_code == 0 and "is left out" not in named.output
    assert run("allow", str(file), "b").exit_code == 0
    assert "is left out" not in dry_run().output
    with pytest.raises(InvalidArgument, match="no place for .*hosts that are denied"):
        write(read(file).with_denied("a", "x"), "slots")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["deny", "{json}", "d"], "'d' is none of the hosts a, b"),
        (["deny", "{lines}", "a"], "only a hostfile of JSON has a place for it"),
        (["deny", "{json}", "a", "--reason", "x" * 300], "is a text of at most 200 characters"),
        (["allow", "{json}", "d"], "'d' is none of the hosts a, b"),
    ],
)
def test_a_host_that_cannot_be_denied(tmp_path, words, message):
    files = {"json": tmp_path / "hosts.json", "lines": tmp_path / "hosts"}
    files["json"].write_text('[{"ssh": "a"}, {"ssh": "b"}]')
    files["lines"].write_text("a slots=2\n")
    before = files["json"].read_text()
    result = run(*(word.format(**files) for word in words))
    assert message in result.output
    assert result.exit_code and files["json"].read_text() == before
