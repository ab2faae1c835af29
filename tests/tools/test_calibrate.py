"""`mlxdist calibrate`: what is measured and rejected, what the tuning file keeps, and the plans made from it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import mlx.core as mx
import pytest
import tiny_models
from click.testing import CliRunner
from mlx_lm.utils import save_config, save_model
from ssh_hosts import ssh_hosts

from mlxdist.base import tuning_file
from mlxdist.base.environment import Environment
from mlxdist.base.errors import EnvironmentVariableError, InvalidArgument
from mlxdist.cli import commands
from mlxdist.cluster.hostfile.hosts import Host, Hostfile, Measured
from mlxdist.cluster.hostfile.parsing import parse
from mlxdist.cluster.hostfile.rank_shares import check_hosts, speeds
from mlxdist.cluster.hostfile.writing import save
from mlxdist.nn.layout.partition import split_sizes
from mlxdist.nn.models.plan import plan_shards
from mlxdist.nn.tensor_parallel.parallel_attention import split_heads
from mlxdist.runtime.group import tuning
from mlxdist.tools.bench.results import by_case
from mlxdist.tools.calibrate import measure
from mlxdist.tools.calibrate.hosts import judge
from mlxdist.version import __version__

TWO = (Host("a", slots=2), Host("b"))
MEASURED = {"a": Measured(30.0, 800.0, 5.0), "b": Measured(10.0, 300.0, 5.0)}


@pytest.fixture(autouse=True)
def tuned(tmp_path, monkeypatch):
    """The tuning file of each test, with two hosts that were measured."""
    path = tmp_path / "tuning" / "tuning.json"
    monkeypatch.setenv("MLXDIST_TUNING_FILE", str(path))
    keep(path, MEASURED)
    return path


def keep(path, hosts):
    tuning_file.update(path, {"hosts": {name: host.as_json() for name, host in hosts.items()}})


def kept(path):
    return tuning_file.read_section(path, "hosts", check_hosts, {})


def run(*words):
    return CliRunner().invoke(commands, [str(word) for word in words])


def mlxdist_command(*words, timeout=120, before=()):
    command = [*before, sys.executable, "-m", "mlxdist", *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout)


def hostfile_of(directory, *hosts):
    save(Hostfile(hosts), directory / "hosts.json")
    return directory / "hosts.json"


# What the tuning file keeps.


def test_the_file_keeps_measurements(tmp_path):
    alone = {"c": Measured(1.0, 2.0)}
    keep(tmp_path / "t.json", MEASURED | alone)
    assert kept(tmp_path / "t.json") == MEASURED | alone


def test_hostfile_commands_show_measurements(tmp_path):
    file = hostfile_of(tmp_path, *TWO)
    assert "800" in run("hostfile", "show", file).stdout
    shown = json.loads(run("hostfile", "show", "--json", file).stdout)
    assert [host["measured"]["memory_gbps"] for host in shown["hosts"]] == [800.0, 300.0]


@pytest.mark.parametrize(
    "measured, message",
    [
        ("3", "b must be an object with tflops, memory_gbps, link_gbps, not 3"),
        ("null", "b must be an object"),
        ("{}", "b must be an object"),
        ('{"tflops": 1}', "b must be an object"),
        ('{"tflop": 1, "tflops": 1, "memory_gbps": 1}', "b must be an object"),
        ('{"tflops": 0, "memory_gbps": 1}', "'tflops' is 0; it must be a number above 0"),
        ('{"tflops": "1", "memory_gbps": 1}', "'tflops' is '1'"),
        ('{"tflops": true, "memory_gbps": 1}', "'tflops' is True"),
        ('{"tflops": 1, "memory_gbps": -1}', "'memory_gbps' is -1"),
        ('{"tflops": 1, "memory_gbps": 1e999}', "1e999 is not a finite number"),
        ('{"tflops": 1, "memory_gbps": 1, "link_gbps": null}', "'link_gbps' is None"),
        ('{"tflops": 1, "memory_gbps": [1]}', r"'memory_gbps' is [1]"),
    ],
)
def test_measurements_that_are_none_are_rejected(tuned, measured, message):
    tuned.write_text(f'{{"schema": 3, "hosts": {{"b": {measured}}}}}')
    with pytest.raises(InvalidArgument) as error:
        speeds(Hostfile((Host("b"),)))
    assert str(tuned) in str(error.value) and message in str(error.value)


def test_a_repeated_host_was_measured_once():
    entry = '{"ssh": "a"}'
    assert speeds(parse(f"[{entry}, {entry}]")) == [1, 1]


# How fast ranks are relative to each other.


@pytest.mark.parametrize("by, expected", [("memory", [1.3333, 1.3333, 1.0]), ("compute", [1.5, 1.5, 1.0])])
def test_speeds_of_ranks(by, expected):
    assert speeds(Hostfile(TWO), by) == expected


def test_speeds_need_measured_hosts():
    with pytest.raises(InvalidArgument, match="hosts.json: c is not measured; run `mlxdist calibrate"):
        speeds(Hostfile((*TWO, Host("c")), source="hosts.json"))
    with pytest.raises(InvalidArgument, match="by 'memory' or by 'compute', not 'disk'"):
        speeds(Hostfile(TWO), "disk")


def test_the_launcher_hands_them_to_the_ranks(tmp_path):
    shown = run("launch", "--hostfile", hostfile_of(tmp_path, *TWO), "--dry-run", "--", "true").stdout.splitlines()
    assert "MLXDIST_RANK_SHARES_MEMORY=1.3333,1.3333,1.0000" in shown
    assert "MLXDIST_RANK_SHARES_COMPUTE=1.5000,1.5000,1.0000" in shown
    assert "MLXDIST_MEMORY_GBPS=400.0000,400.0000,300.0000" in shown
    file = hostfile_of(tmp_path, *TWO, Host("c"))
    shown = run("launch", "--hostfile", file, "--dry-run", "--", "true").stdout
    assert "RANK_SHARES" not in shown and "MEMORY_GBPS" not in shown
    assert "RANK_SHARES_MEMORY" in run("launch", "--hostfile", file, "--exclude", "c", "--dry-run", "--", "true").stdout


@pytest.mark.parametrize("text", ["", "1,", "0,1", "-1", "1 2", "inf", "1e3", "a"])
def test_variables_that_are_no_weights(text):
    with pytest.raises(
        EnvironmentVariableError, match="MLXDIST_RANK_SHARES_COMPUTE='.*' is not a number above 0 for each"
    ):
        Environment.read({"MLXDIST_RANK_SHARES_COMPUTE": text})


def test_weights_of_another_number_of_ranks():
    with pytest.raises(EnvironmentVariableError, match="MLXDIST_RANK_SHARES_MEMORY=1,2 has 2 numbers, but there are 1"):
        Environment.read({"MLXDIST_RANK": "0", "MLXDIST_WORLD_SIZE": "1", "MLXDIST_RANK_SHARES_MEMORY": "1,2"})


# Plans.


@pytest.fixture
def measured_job(monkeypatch):
    monkeypatch.setenv("MLXDIST_RANK_SHARES_MEMORY", "2,1")
    monkeypatch.setenv("MLXDIST_RANK_SHARES_COMPUTE", "3,1")


def test_a_plan_with_measured_weights_is_that_with_the_numbers(measured_job):
    model = tiny_models.build("qwen3")
    for by, weights in (("memory", [2, 1]), ("compute", [3, 1])):
        plan = plan_shards(model, tp=2, rank_shares=by)
        assert plan.to_json() == plan_shards(model, tp=2, rank_shares=weights).to_json()
        assert plan.rank_shares == tuple(weights) and plan.bytes(0) > plan.bytes(1)


def test_columns_of_a_grid_are_as_fast_as_their_slowest_rank(monkeypatch):
    monkeypatch.setenv("MLXDIST_RANK_SHARES_MEMORY", "4,1,2,3")
    plan = plan_shards(tiny_models.build("mixtral"), tp=2, ep=2, rank_shares="memory")
    assert plan.rank_shares == (2.0, 1.0)


def test_layers_take_measured_weights(measured_job):
    assert split_sizes("layer", 12, 2, "memory") == [8, 4]
    assert split_sizes("layer", 12, 2, "compute") == [9, 3]
    assert split_heads("attention", 4, 1, 2, "compute") == split_heads("attention", 4, 1, 2, [3, 1])


@pytest.mark.parametrize(
    "weights, ranks, words",
    [
        ("memory", 3, "are those of the 2 ranks of the job, but 3 share the work here; give numbers"),
        ("disk", 2, 'layer: rank_shares must be 2 numbers, one per rank, or "memory" or "compute", not \'disk\''),
    ],
)
def test_weights_that_do_not_fit(measured_job, weights, ranks, words):
    with pytest.raises(InvalidArgument) as error:
        split_sizes("layer", 12, ranks, weights)
    assert words in str(error.value)


def test_measured_weights_need_a_measured_job():
    with pytest.raises(InvalidArgument, match="needs a job whose hosts are measured: `mlxdist calibrate`"):
        plan_shards(tiny_models.build("qwen3"), tp=2, rank_shares="memory")


def test_shard_shows_the_plan_of_a_hostfile(tmp_path):
    model = tiny_models.build("qwen3")
    directory = tmp_path / "model"
    directory.mkdir()
    save_model(directory, model)
    save_config(asdict(model.args), directory / "config.json")
    file = hostfile_of(tmp_path, Host("a"), Host("b"))

    def plan(*options):
        result = run("shard", directory, "--json", *options)
        assert result.exit_code == 0, result.output
        return json.loads(result.output)["plan"]

    by_memory = [round(800 / 300, 4), 1.0]
    assert plan("--hostfile", file) == plan("--tp", "2", "--rank-shares", ",".join(map(str, by_memory)))
    assert plan("--hostfile", file)["rank_shares"] == by_memory
    assert plan("--hostfile", file, "--rank-shares", "compute")["rank_shares"] == [3.0, 1.0]
    assert plan("--hostfile", file, "--rank-shares", "1,2")["rank_shares"] == [1.0, 2.0]
    assert "has 2 ranks, not --tp 4 times --ep 1" in run("shard", directory, "--hostfile", file, "--tp", "4").output
    assert "give their --hostfile, too" in run("shard", directory, "--tp", "2", "--rank-shares", "memory").output


# Measuring.


def part(median=1.0, wrong=0, **more):
    return {
        "median": median,
        "min": median,
        "max": median,
        "count": 3,
        "wrong": wrong,
        "foreign_cpu_share": 0.02,
    } | more


def parts(**changed):
    of_host = {"float32": part(10.0, dtype="float32"), "float16": None, "bfloat16": None}
    return of_host | {name: part(400.0) for name in ("copy", "sum", "row")} | changed


def link(**changed):
    return {"source": 0, "target": 1, "median": 5.0, "min": 4.0, "max": 6.0, "wrong": 0, "memcpy": 20.0} | changed


def judged(of_a=None, of_b=None, *links):
    machine = {"device": "Apple M4"}
    return judge(["a", "b"], [machine, machine], [of_a or parts(), of_b or parts()], links)


def test_measurements_of_hosts():
    a, b = judged(parts(float16=part(28.12345, dtype="float16")), None, link(), link(source=1, target=0, median=3))
    assert a.measured == Measured(28.12, 400.0, 3.0) and b.measured == Measured(10.0, 400.0, 3.0)
    assert a.product["dtype"] == "float16" and not a.problems and not b.problems


@pytest.mark.parametrize(
    "of_a, words",
    [
        (parts(float32=part(1e5, dtype="float32")), "1e+05 TFLOPS in 'float32' cannot be"),
        (parts(float32=part(float("nan"), dtype="float32")), "nan TFLOPS in 'float32' cannot be"),
        (parts(row=part(1e6)), "1e+06 GB/s in 'row' cannot be"),
        (parts(copy=part(0.0)), "0 GB/s in 'copy' cannot be"),
        (parts(sum=part(wrong=3)), "3 elements of the results of 'sum' are wrong"),
        (parts(float32=None), "there is no result of 'float32'"),
    ],
)
def test_what_cannot_be_is_no_result(of_a, words):
    a, b = judged(of_a)
    assert words in " ".join(a.problems) and not b.problems


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"wrong": 7}, "7 elements of what came from a are wrong"),
        ({"median": 31.0}, "came with 31 GB/s, but this host copies 20 GB/s at most"),
    ],
)
def test_links_that_cannot_be(changed, words):
    a, b = judged(None, None, link(**changed))
    assert words in " ".join(b.problems) and not a.problems


def test_slow_hosts_are_marked():
    a, b = judged(parts(row=part(300.0)), None, link())
    assert a.slow == {"memory_gbps"} and b.slow == set()
    other = [{"device": "Apple M1"}, {"device": "Apple M4"}]
    assert not judge(["a", "b"], other, [parts(row=part(300.0)), parts()], [])[0].slow


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_wrong_products_are_noticed(dtype):
    a, b = (mx.random.normal(shape).astype(getattr(mx, dtype)) for shape in ((8, 64), (64, 8)))
    right = a @ b
    assert measure._count_wrong(a, b, right, dtype) == 0
    assert measure._count_wrong(a, b, right + 5, dtype) == 64
    assert measure._count_wrong(a, b, right * mx.nan, dtype) == 64


@pytest.mark.parametrize("kind", ["copy", "sum", "row"])
def test_memory_is_measured_by_work_that_is_done(monkeypatch, kind):
    monkeypatch.setitem(measure.ARRAY_BYTES, "cpu", 4 << 20)
    work, moved, wrong = measure._memory(kind)
    assert wrong() > 0, "nothing has been computed yet"
    work()
    assert wrong() == 0 and moved == (8 if kind == "copy" else 4) << 20


def test_this_machine(tuned):
    words = ["calibrate", "--only", "hosts", "--seconds", "0.1", "--json", "--force"]
    job = mlxdist_command(*words)
    assert job.returncode == 0, job.stderr
    (host,) = json.loads(job.stdout)["hosts"]
    found = kept(tuned)["localhost"]
    assert host["host"] == "localhost" and found.link_gbps is None and kept(tuned).keys() == {"localhost", "a", "b"}
    assert found.memory_gbps == pytest.approx(host["parts"]["row"]["median"], rel=1e-3)
    assert found.tflops > 0 and host["problems"] == []


def test_a_dry_run_saves_nothing(tuned):
    before = tuned.read_text()
    job = mlxdist_command("calibrate", "--only", "hosts", "--seconds", "0.1", "--dry-run")
    assert job.returncode == 0 and "localhost" in job.stdout and tuned.read_text() == before, job.stderr


@pytest.mark.long
def test_no_algorithm_to_choose_in_a_ring_of_cables(tuned, monkeypatch):
    """Every operation has one algorithm there, or none."""
    monkeypatch.setenv("MLXDIST_TOPOLOGY", "0-1,1-2,2-3,3-0")
    words = ["calibrate", "--only", "algorithms", "-n", "4", "--max", "1KiB", "--repeats", "3", "--dry-run"]
    job = mlxdist_command(*words, timeout=240)
    assert job.returncode == 0 and "4 ranks, hosts: 1" in job.stdout, job.stderr


@pytest.mark.long
def test_algorithms_and_experts_are_saved_for_jobs(tuned):
    """For two ranks and for three; and a job uses them."""
    words = ["calibrate", "--only", "algorithms,experts", "--max", "1KiB", "--repeats", "3", "--force"]
    job = mlxdist_command(*words, "--json", timeout=240)
    assert job.returncode == 0, job.stderr
    found, saved = json.loads(job.stdout), tuning.read(tuned)
    measured = {result["case"]["operation"] for result in found["algorithms"]["cases"]}
    assert {row.operation for row in saved.algorithms} == measured == {*tuning.TUNED} - {"all_to_all"}  # on one host
    for row in by_case(found["algorithms"]):
        assert len(row) >= 2 and all(result["default"] in row for result in row.values())
    assert saved.expert_links == found["experts"] and len(found["experts"]) == 1
    job = mlxdist_command(*words, "-n", "3", timeout=240)
    assert job.returncode == 0 and f"Saved to {tuned}" in job.stderr and "copied by all ranks at once" in job.stdout
    saved = tuning.read(tuned)
    assert {row.ranks for row in saved.algorithms} == {link["ranks"] for link in saved.expert_links} == {2, 3}
    assert {row.hosts for row in saved.algorithms} == {link["hosts"] for link in saved.expert_links} == {1}
    assert kept(tuned) == MEASURED
    program = "from mlxdist.nn.expert_parallel import LinkCosts; print(LinkCosts.of(group=mlxdist.init()).measured)"
    job = mlxdist_command("launch", "-n", "2", "--", sys.executable, "-c", f"import mlxdist; {program}")
    assert sorted(job.stdout.splitlines()) == ["[0] True", "[1] True"], job.stderr


def test_the_first_calibration_makes_the_file_of_the_variable(tuned):
    tuned.unlink()
    job = mlxdist_command("calibrate", "--only", "experts", "--repeats", "3", "--force")
    assert job.returncode == 0 and [link["ranks"] for link in tuning.read(tuned).expert_links] == [2], job.stderr


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the system does not say what other processes use")
def test_nothing_is_saved_that_was_measured_under_load(tuned):
    before = tuned.read_text()
    words = ["calibrate", "--only", "algorithms", "--max", "1KiB", "--repeats", "3"]
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(1 + os.cpu_count() // 4)]
    try:
        job = mlxdist_command(*words, timeout=240)
    finally:
        for other in others:
            other.kill()
            other.wait()
    said = " ".join(job.stderr.split())
    assert job.returncode == 1 and f"nothing is saved to {tuned}: algorithms: other processes used " in said
    assert "give --force" in said and "Other processes used" in job.stdout and tuned.read_text() == before


def test_what_does_not_fit_into_memory_is_rejected():
    job = mlxdist_command("calibrate", "--only", "algorithms", "-n", "256", "--max", "4GiB", "--dry-run")
    said = " ".join(job.stderr.split())
    assert job.returncode == 2 and "all_gather of 4 GiB by 256 ranks" in said and "or fewer ranks" in said


@pytest.mark.parametrize("text", ["my notes", '{"schema": 3, "algorithms": [7]}', '{"schema": 3, "hosts": 7}'])
def test_a_file_that_is_not_understood_is_not_replaced(tuned, text):
    tuned.write_text(text)
    result = run("calibrate", "--only", "hosts")
    assert result.exit_code == 2 and str(tuned) in result.output and tuned.read_text() == text


def test_there_must_be_a_file_to_save_to(monkeypatch):
    monkeypatch.setenv("MLXDIST_TUNING_FILE", "none")
    result = run("calibrate")
    assert result.exit_code == 1 and "there is no file to save to; unset it, or give --output" in result.output


def responding(directory, **results):
    """An ssh whose other side is a host that answers so."""
    machine = {"host": "a", "device": "Apple M4", "identity": "a", "mlxdist": __version__, "mlx": "0"}
    program = f"""#!{sys.executable}
import json, os
machine, parts = json.loads({json.dumps(json.dumps([machine, parts(**results)]))})
from mlxdist.cluster.ssh.protocol import GREETING, Frames, Kind, pack_json, unpack_json
os.write(1, GREETING)
frames = Frames()
while data := os.read(0, 65536):
    for _, _, payload in frames.feed(data):
        call = unpack_json(payload)
        result = machine if call["call"] == "calibrate.machine" else parts[call["arguments"]["part"]]
        os.write(1, pack_json(Kind.RESULT, {{"result": result}}))
"""
    path = directory / "ssh"
    path.write_text(program)
    path.chmod(0o700)
    return ["--ssh", path]


def calibrate_hosts(file, *options):
    return run("calibrate", "--only", "hosts", "--hostfile", file, *options)


def test_measurements_that_cannot_be_are_not_written(tuned, tmp_path):
    before = tuned.read_text()
    result = calibrate_hosts(hostfile_of(tmp_path, Host("a")), *responding(tmp_path, row=part(1e6)))
    assert result.exit_code == 1 and "a: 1e+06 GB/s in 'row' cannot be" in result.output
    assert tuned.read_text() == before


def test_measurements_are_written(tuned, tmp_path):
    """Next to those of other hosts, which --exclude leaves out."""
    result = calibrate_hosts(hostfile_of(tmp_path, *TWO), "--exclude", "b", *responding(tmp_path))
    assert result.exit_code == 0, result.output
    assert kept(tuned) == MEASURED | {"a": Measured(10.0, 400.0)}


def test_measurements_of_a_busy_host_are_not_written(tuned, tmp_path):
    file = hostfile_of(tmp_path, Host("a"))
    options = responding(tmp_path, row=part(400.0, foreign_cpu_share=0.5))
    result = calibrate_hosts(file, *options)
    assert result.exit_code == 1 and kept(tuned) == MEASURED
    words = "a: other processes used 14% of the CPU meanwhile; repeat this on a quiet machine, or give --force"
    assert f"nothing is saved to {tuned}: {words}" in " ".join(result.output.split())
    result = calibrate_hosts(file, *options, "--force")
    assert result.exit_code == 0 and kept(tuned)["a"] == Measured(10.0, 400.0)


def test_a_host_that_does_not_respond(tmp_path):
    (tmp_path / "ssh").write_text("#!/bin/sh\necho Permission denied >&2; exit 255\n")
    (tmp_path / "ssh").chmod(0o700)
    result = run("calibrate", "--only", "hosts", "--hosts", "a", "--ssh", tmp_path / "ssh")
    assert result.exit_code == 1 and "a does not respond: Permission denied" in result.output


def test_names_of_one_machine_are_rejected():
    result = run("calibrate", "--only", "hosts", "--hosts", "localhost,127.0.0.1")
    assert result.exit_code == 1 and "localhost and 127.0.0.1 are one machine; give it once" in result.output


@pytest.mark.long
def test_two_hosts(tuned, tmp_path):
    """Both are measured, their link too, by a job; and a job with the figures cuts a layer as they say."""
    directory = tmp_path / "hosts"
    directory.mkdir()
    program = (
        "import mlxdist, numpy\nfrom mlxdist.nn.tensor_parallel.column_parallel import ColumnParallelLinear\n"
        "mlxdist.init(); print(ColumnParallelLinear(8, 30, rank_shares='memory').sizes)"
    )
    with ssh_hosts(directory) as nodes:
        hosts = [Host(name, ips=(host.address,)) for name, host in zip(nodes.names, nodes.hosts)]
        file = hostfile_of(tmp_path, *hosts)
        options = ["--hostfile", file, "--ssh", nodes.ssh]
        job = mlxdist_command(
            *("calibrate", *options, "--only", "hosts", "--seconds", "1", "--force"),  # both are this machine
            before=nodes.command(),
            timeout=240,
        )
        assert job.returncode == 0, job.stderr
        assert all(kept(tuned)[host.name].link_gbps > 0 for host in hosts)
        keep(tuned, {host.name: Measured(1.0, figure) for host, figure in zip(hosts, (4.0, 2.0))})
        job = mlxdist_command("launch", *options, "--", sys.executable, "-c", program, before=nodes.command())
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [f"[{rank} node{rank}] [20, 10]" for rank in range(2)]


@pytest.mark.long
def test_algorithms_between_two_hosts(tuned, tmp_path):
    """The hierarchy is measured, too; rows and exchanges are of four ranks on two hosts."""
    directory = tmp_path / "hosts"
    directory.mkdir()
    with ssh_hosts(directory) as nodes:
        file = hostfile_of(tmp_path, *(Host(name, ips=(h.address,)) for name, h in zip(nodes.names, nodes.hosts)))
        words = ["--only", "algorithms,experts", "-n", "2", "--max", "1KiB", "--repeats", "3", "--force", "--json"]
        job = mlxdist_command(
            "calibrate", "--hostfile", file, "--ssh", nodes.ssh, *words, before=nodes.command(), timeout=240
        )
    assert job.returncode == 0, job.stderr
    variants = {
        next(iter(row.values()))["case"]["operation"]: set(row) for row in by_case(json.loads(job.stdout)["algorithms"])
    }
    hierarchical = {name for name, measured in variants.items() if "hierarchical" in measured}
    assert hierarchical == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    saved = tuning.read(tuned)
    assert {(row.ranks, row.hosts) for row in saved.algorithms} == {(4, 2)}
    shapes = [(link["provider"], link["ranks"], link["hosts"]) for link in saved.expert_links]
    assert shapes == [("soft", 4, 2), ("soft", 2, 1)]  # and of the neighbors that could be a stage


@pytest.mark.long
def test_a_model_is_loaded_in_measured_shares(run_ranks, tmp_path):
    """And computes the same logits as the whole one."""
    model = tiny_models.build("qwen3")
    save_model(tmp_path / "model", model)
    save_config(asdict(model.args), tmp_path / "model" / "config.json")
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\nos.environ['MLXDIST_RANK_SHARES_MEMORY'] = '3,1'\nfrom mlxdist import nn\n"
        "model, _ = nn.load_sharded(sys.argv[1], rank_shares='memory', verify=True)\n"
        "print('held', model.layers[0].mlp.gate_proj.weight.shape[0])\n"
    )
    outputs = run_ranks(script, 2, tmp_path / "model")
    whole = model.layers[0].mlp.gate_proj.weight.shape[0]
    assert [f"held {whole * share // 4}\n" in output for share, output in zip((3, 1), outputs)] == [True, True]
