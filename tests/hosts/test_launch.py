"""What `mlxdist launch` gives its ranks, and what it refuses."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from launching import LAUNCH, launch, nothing_left, python, running  # noqa: F401

from mlxdist.cli import commands
from mlxdist.launch import jit_cache
from mlxdist.launch.options import with_python


def test_ranks_know_themselves():
    job = python(2, "print({k: v for k, v in os.environ.items() if k.startswith('MLXDIST_')})")
    for rank, line in enumerate(sorted(job.stdout.decode().splitlines())):
        variables = eval(line.split(" ", 1)[1])
        assert variables["MLXDIST_RANK"] == str(rank)
        assert variables["MLXDIST_WORLD_SIZE"] == "2"
        assert re.fullmatch(r"127\.0\.0\.1:\d+", variables["MLXDIST_RENDEZVOUS"])
        assert re.fullmatch(r"[0-9a-f]{64}", variables["MLXDIST_SECRET"])
        assert ("MLXDIST_RENDEZVOUS_FD" in variables) == (rank == 0)


def test_the_secret_is_on_no_command_line():
    program = "import subprocess; print(os.environ['MLXDIST_SECRET']); print(subprocess.getoutput('ps -axww -o args'))"
    secret, *processes = python(1, program).stdout.decode().splitlines()
    assert len(processes) > 2 and not any(secret[4:] in process for process in processes)


def test_ranks_find_together():
    """With the environment and the socket that the launcher hands over."""
    job = python(
        3,
        "from mlxdist.base.environment import Environment; from mlxdist.runtime.rendezvous import Rendezvous\n"
        "r = Rendezvous(Environment.read()); print(r.all_gather(str(rank).encode(), 'x')); r.close()",
    )
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [b"[%d] [b'0', b'1', b'2']" % rank for rank in range(3)]


def test_settings_with_any_content():
    value = "a=b \"quoted\" 'single' $HOME\nsecond line\ttab \u20ac"
    job = python(
        2,
        "print(repr(os.environ['SETTING']), repr(os.environ['EMPTY']))",
        options=["--env", f"SETTING={value}", "--env", "EMPTY="],
    )
    assert sorted(job.stdout.decode().splitlines()) == [f"[{rank}] {value!r} ''" for rank in range(2)]


def test_arguments_with_any_content():
    arguments = ["two words", "--grace-period", "-n", "", "'\"", "$HOME", "new\nline", "--"]
    job = launch(1, sys.executable, "-c", "import sys; print(sys.argv[1:])", *arguments)
    assert job.stdout.decode() == f"[0] {arguments}\n"


def test_command_without_the_two_dashes():
    job = subprocess.run([*LAUNCH, "-n", "2", "echo", "-n", "5"], capture_output=True, timeout=30)
    assert sorted(job.stdout.splitlines()) == [b"[0] 5", b"[1] 5"]


def test_mlx_s_own_variables_are_removed(monkeypatch):
    for name in ("MLX_SIZE", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_RANK", "MLX_OTHER"):
        monkeypatch.setenv(name, "x")
    for name in ("JACCL_COORDINATOR", "NCCL_HOST_IP", "NCCL_PORT"):
        monkeypatch.setenv(name, "x")
    job = python(1, "print(sorted(name for name in os.environ if name.startswith(('MLX_', 'JACCL_', 'NCCL_'))))")
    numbers = ["MLX_GLOBAL_RANK", "MLX_LOCAL_RANK", "MLX_MPI_LIBNAME", "MLX_OTHER", "MLX_RANK", "MLX_WORLD_SIZE"]
    assert job.stdout.decode() == f"[0] {numbers}\n"


def test_ranks_have_the_numbers_that_mlx_programs_look_for(monkeypatch):
    monkeypatch.setenv("MLX_RANK", "7")
    names = ["MLX_RANK", "MLX_GLOBAL_RANK", "MLX_LOCAL_RANK", "MLX_WORLD_SIZE"]
    job = python(2, f"print([os.environ[name] for name in {names}])")
    lines = sorted(job.stdout.decode().splitlines())
    assert lines == [f"[{rank}] {[str(rank)] * 3 + ['2']}" for rank in range(2)]


@pytest.mark.parametrize("option", ["--gpus", "--repeat-hosts", "-np"])
def test_other_names_of_n(option):
    job = subprocess.run([*LAUNCH, option, "2", "--", "echo", "x"], capture_output=True, timeout=30)
    assert sorted(job.stdout.splitlines()) == [b"[0] x", b"[1] x"]


def test_print_python():
    shown = CliRunner().invoke(commands, ["launch", "--print-python"])
    assert (shown.exit_code, shown.stdout) == (0, f"{sys.executable}\n")
    shown = CliRunner().invoke(commands, ["launch", "--python", "/else/where/python", "--print-python"])
    assert shown.stdout == "/else/where/python\n"


def test_python_runs_the_command(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(sys.executable, sys.argv[1:])")
    link = tmp_path / "mypython"
    link.symlink_to(os.path.realpath(sys.executable))
    job = launch(1, "script.py", "-x", options=["--python", str(link)], cwd=tmp_path)
    assert job.stdout.decode() == f"[0] {link} ['-x']\n", job.stderr


@pytest.mark.parametrize(
    "command, run",
    [
        (["train.py", "-n", "2"], ["X", "train.py", "-n", "2"]),
        (["-m", "mlx_lm.chat"], ["X", "-m", "mlx_lm.chat"]),
        (["-c", "pass"], ["X", "-c", "pass"]),
        (["python", "train.py"], ["X", "train.py"]),
        (["python3", "train.py"], ["X", "train.py"]),
        (["python3.12", "train.py"], ["X", "train.py"]),
        (["/usr/bin/python3", "train.py"], ["/usr/bin/python3", "train.py"]),
        (["pythonic", "train.py"], ["pythonic", "train.py"]),
        (["bash", "train.sh"], ["bash", "train.sh"]),
    ],
)
def test_which_commands_python_runs(command, run):
    assert with_python(command, "X") == run
    by_itself = run[0] == "X" and not command[0].startswith("python")
    assert with_python(command, "") == ([sys.executable, *command] if by_itself else command)


def test_a_command_is_looked_for_where_it_will_run(tmp_path):
    program = tmp_path / "sub" / "run.sh"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\npwd\n")
    program.chmod(0o755)
    job = launch(1, "./run.sh", options=["--cwd", "sub"], cwd=tmp_path)
    assert job.stdout.decode() == f"[0] {program.parent}\n", job.stderr
    refused = launch(1, "sub/run.sh", options=["--cwd", "sub"], cwd=tmp_path)
    assert refused.returncode == 127 and b"The command 'sub/sub/run.sh' does not exist" in refused.stderr
    refused = launch(1, "pwd", options=["--cwd", "elsewhere"], cwd=tmp_path)
    assert refused.returncode == 2 and b"--cwd elsewhere is not a directory" in refused.stderr


def test_a_dry_run_creates_no_directory(tmp_path):
    job = launch(1, "true", options=["--log-dir", str(tmp_path / "logs"), "--dry-run"])
    assert job.returncode == 0 and not (tmp_path / "logs").exists()


def test_a_byte_order_mark_of_an_env_file_is_not_read(tmp_path):
    (tmp_path / "env").write_text("A_NAME=1\n", encoding="utf-8-sig")
    job = python(1, "print(os.environ['A_NAME'])", options=["--env-file", str(tmp_path / "env")])
    assert job.stdout == b"[0] 1\n", job.stderr


def test_an_env_file_that_is_no_text(tmp_path):
    (tmp_path / "env").write_bytes(b"A=1\nB=\xff\n")
    job = launch(1, "true", options=["--env-file", str(tmp_path / "env")])
    assert job.returncode == 2 and b"env: byte 6 is not of UTF-8" in job.stderr and b"Traceback" not in job.stderr


FOR_HOSTS = ("hosts", "remote", "agent", "nodes", "mpirun")


def test_a_job_on_this_machine_loads_nothing_of_other_hosts():
    """It would cost time at every start."""
    command = [sys.executable, "-X", "importtime", *LAUNCH[1:], "-n", "1", "--", "true"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stderr
    names = [line.rpartition("|")[2].strip() for line in printed.splitlines() if line.startswith("import time:")]
    assert "mlxdist.launch.local" in names
    unwanted = (
        "mlxdist.cluster.ssh",
        "mlxdist.runtime.devices",
        "mlxdist.cluster.hostfile.",
        *(f"mlxdist.launch.{x}" for x in FOR_HOSTS),
    )
    assert [name for name in names if name.startswith(unwanted) and name != "mlxdist.cluster.hostfile.options"] == []


def test_a_job_inside_a_job(monkeypatch):
    monkeypatch.setenv("MLXDIST_TIMEOUT", "77")
    inner = [
        *LAUNCH,
        "-n",
        "2",
        "--",
        sys.executable,
        "-c",
        "import os; e = os.environ; print(e['MLXDIST_RANK'], e['MLXDIST_WORLD_SIZE'], e['MLXDIST_TIMEOUT'])",
    ]
    job = launch(3, *inner)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [b"[%d] [%d] %d 2 77" % (o, i, i) for o in range(3) for i in range(2)]


@pytest.mark.parametrize("choice, second", [([], b"'hello\\nworld'"), (["--stdin", "0"], b"''")])
def test_standard_input(choice, second):
    job = python(2, "import sys; print(repr(sys.stdin.read()))", input=b"hello\nworld", stdin=None, options=choice)
    assert sorted(job.stdout.splitlines()) == [b"[0] 'hello\\nworld'", b"[1] " + second]


def test_temporary_directories_are_separate_and_writable():
    job = python(2, "import tempfile; print(tempfile.mkdtemp())")
    directories = [line.split()[1] for line in job.stdout.splitlines()]
    assert len({os.path.dirname(directory) for directory in directories}) == 2
    assert not any(os.path.exists(directory) for directory in directories)


def test_unused_virtual_environment_is_used(monkeypatch):
    """`.venv/bin/mlxdist launch -- python` means the python of that environment."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("not in a virtual environment")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert launch(1, "python", "-c", "import sys; print(sys.prefix)").stdout.decode() == f"[0] {sys.prefix}\n"


def test_without_a_place_for_kernels(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    job = python(2, "print(os.path.realpath(os.path.join(os.environ['TMPDIR'], 'mlx')))")
    (directory,) = {line.split()[1] for line in job.stdout.decode().splitlines()}
    assert job.returncode == 0 and directory.endswith("/jit") and not os.path.exists(directory)


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["-n", "0", "--", "true"], 2, "0 is not in the range 1<=x<=256"),
        (["-n", "-1", "--", "true"], 2, "-1 is not in the range"),
        (["-n", "300", "--", "true"], 2, "300 is not in the range 1<=x<=256"),
        (["-n", "two", "--", "true"], 2, "'two' is not a valid integer"),
        (["--", "true"], 2, "Missing option '-n'"),
        (["-n", "2"], 2, "No command given. Write it after --"),
        (["-n", "2", "--"], 2, "No command given"),
        (["-n", "2", "--grade-period", "3", "--", "true"], 2, "--grace-period"),
        (["-n", "2", "--grace-period", "-1", "--", "true"], 2, "--grace-period"),
        (["-n", "2", "--env", "NAME", "--", "true"], 2, "'NAME' is not NAME=VALUE"),
        (["-n", "2", "--env", "=x", "--", "true"], 2, "'=x' is not NAME=VALUE"),
        (["-n", "2", "--env", "export C=3", "--", "true"], 2, "'export C' is no name of a variable; leave `export`"),
        (["-n", "2", "--env-file", "/no/such", "--", "true"], 2, "--env-file /no/such: No such file or directory."),
        (["-n", "2", "--env-file", "/dev/zero", "--", "true"], 2, "--env-file /dev/zero: it has more than 1048576"),
        (["-n", "2", "--log-dir", "/dev/null", "--", "true"], 1, "--log-dir: /dev/null cannot be made: File exists"),
        (["--hosts", "a", "--ssh", "nosuch", "--", "true"], 1, "a: the command 'nosuch' cannot be run: No such file"),
        (["-n", "2", "--env", "MLXDIST_TIMOUT=3", "--", "true"], 2, "did you mean MLXDIST_TIMEOUT?"),
        (["-n", "2", "--env", "MLXDIST_RANK=3", "--", "true"], 2, "MLXDIST_RANK is set by the launcher"),
        (["-n", "2", "--env", "MLX_RANK=3", "--", "true"], 2, "MLX_RANK is set by the launcher"),
        (["-n", "2", "--env", "TMPDIR=/no/such/directory", "--", "true"], 2, "/no/such/directory"),
        (["-n", "2", "--", "no-such-command"], 127, "'no-such-command' does not exist"),
        (["-n", "2", "--", "./no-such-command"], 127, "'./no-such-command' does not exist"),
        (["-n", "2", "--", "/tmp"], 126, "/tmp is a directory"),
    ],
)
def test_bad_input(arguments, status, words):
    job = CliRunner().invoke(commands, ["launch", *arguments])
    assert (job.exit_code, job.stdout) == (status, "")
    assert words in job.stderr
    assert isinstance(job.exception, SystemExit)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to another user")
def test_a_log_directory_at_another_users_link(tmp_path):
    logs, link = tmp_path / "logs", tmp_path / "link"
    logs.mkdir()
    link.symlink_to(logs)
    command = [*LAUNCH, "-n", "1", "--log-dir", link, "--", "true"]
    assert subprocess.run(command).returncode == 0
    written = list(logs.iterdir())
    os.lchown(link, 65534, 65534)
    job = subprocess.run(command, capture_output=True, text=True)
    assert job.returncode == 1 and f"--log-dir: {link} is a link of another user" in job.stderr, job.stderr
    assert list(logs.iterdir()) == written


def test_a_current_directory_that_does_not_exist(tmp_path):
    def launch_in_none(*options):
        command = shlex.join([*LAUNCH, *options, "-n", "1", "--", "pwd"])
        (tmp_path / "gone").mkdir()
        return subprocess.run(f"rmdir ../gone; exec {command}", shell=True, cwd=tmp_path / "gone", capture_output=True)

    job = launch_in_none()
    assert job.returncode == 2 and b"The current directory does not exist any more" in job.stderr, job.stderr
    assert launch_in_none("--cwd", str(tmp_path)).stdout.decode() == f"[0] {tmp_path}\n"


def test_the_exit_status_of_bad_input():
    job = subprocess.run([*LAUNCH, "-n", "0", "--", "true"], capture_output=True, text=True, timeout=30)
    assert (job.returncode, job.stdout) == (2, "")
    assert "0 is not in the range 1<=x<=256" in job.stderr


def test_a_script_is_a_command(tmp_path):
    """As in mlx.launch's documentation; not executable, and without the `python` in front."""
    (tmp_path / "train.py").write_text("import sys; print(sys.executable, sys.argv[1:])")
    job = launch(1, "train.py", "--epochs", "3", cwd=tmp_path)
    assert job.stdout.decode() == f"[0] {sys.executable} ['--epochs', '3']\n", job.stderr


def test_a_file_that_is_not_executable(tmp_path):
    (tmp_path / "program").write_text("#!/bin/sh\n")
    job = launch(2, str(tmp_path / "program"))
    assert job.returncode == 126 and b"program is not executable" in job.stderr


def test_a_file_that_is_no_program(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    job = launch(2, str(program))
    assert job.returncode == 126 and b"Cannot start rank 0" in job.stderr and b"Traceback" not in job.stderr


def test_variables_that_contradict_each_other(monkeypatch):
    monkeypatch.setenv("MLXDIST_BULK_SLOTS", "1000")
    job = launch(2, "true")
    assert job.returncode == 2 and b"MLXDIST_BULK_SLOTS='1000'" in job.stderr


def test_a_temporary_directory_that_cannot_be_written(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/proc")
    job = launch(2, "true")
    assert job.returncode == 1
    assert b"Error: the job cannot be prepared in /proc/mlxdist-" in job.stderr and b"Traceback" not in job.stderr


def test_a_kernel_is_compiled_once_for_all_ranks_and_jobs(tmp_path):
    """A job that fails keeps it, too: a library has its name when it is complete."""
    program = "import sys; import mlx.core as mx; mx.eval(mx.compile(lambda x: mx.exp(x) * x)(mx.ones(3))); sys.exit(3)"
    compiled = set()
    for _ in range(2):
        assert launch(2, sys.executable, "-c", program).returncode == 3
        (kernel,) = (tmp_path / "cache" / "mlxdist" / "jit").rglob("*.so")
        compiled.add(kernel.stat().st_mtime_ns)
    assert len(compiled) == 1


def test_kernels_do_not_pile_up_for_ever(monkeypatch, tmp_path):
    monkeypatch.setattr(jit_cache, "MAX_FILES", 4)
    kept = []
    for job in range(3):
        cache = jit_cache.JitCache(tmp_path, has_gpus=False)
        kernels = cache.directory / "0.32.4"
        kernels.mkdir(exist_ok=True)
        kept.append(len(list(kernels.iterdir())))
        for number in range(2):
            (kernels / f"{job}-{number}.so").touch()
        cache.close()
    assert kept == [0, 2, 0]  # at the third job: four kernels and the lock


def test_kernels_of_a_job_that_runs_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(jit_cache, "MAX_FILES", 0)
    with contextlib.closing(jit_cache.JitCache(tmp_path, has_gpus=False)) as cache:
        (cache.directory / "0.32.4").mkdir()
        (cache.directory / "0.32.4" / "kernel.so").touch()
        with contextlib.closing(jit_cache.JitCache(tmp_path, has_gpus=False)) as other:
            assert other.directory == cache.directory
        assert (cache.directory / "0.32.4" / "kernel.so").exists()


def test_each_rank_has_its_own_kernels_for_gpus(tmp_path):
    """MLX writes these under their name at once. Those of a job that succeeds are there for the next one."""

    def run(job, succeeds):
        """Returns what each of two ranks finds. It writes a kernel with the name of the job."""
        found = []
        with contextlib.closing(jit_cache.JitCache(tmp_path / job, has_gpus=True)) as cache:
            for rank in range(2):
                (tmp_path / job / str(rank)).mkdir(parents=True)
                own = Path(cache.link(tmp_path / job / str(rank), rank)["MLX_PTX_CACHE_DIR"])
                found.append({path.name for path in own.rglob("*.ptx")})
                (own / "long").mkdir(parents=True, exist_ok=True)
                (own / "long" / f"{job}{rank}.ptx").touch()
            if succeeds:
                cache.keep()
        return found

    assert run("a", succeeds=True) == [set(), set()]
    assert run("b", succeeds=False) == [{"a0.ptx", "a1.ptx"}] * 2
    with contextlib.closing(jit_cache.JitCache(tmp_path / "other", has_gpus=True)):
        assert run("c", succeeds=True) == [{"a0.ptx", "a1.ptx"}] * 2
    assert run("d", succeeds=True) == [{"a0.ptx", "a1.ptx"}] * 2, "another job ran beside the last one"


def test_kernels_that_cannot_be_kept_end_no_job(tmp_path):
    with contextlib.closing(jit_cache.JitCache(tmp_path, has_gpus=True)) as cache:
        own = Path(cache.link(tmp_path, 0)["MLX_PTX_CACHE_DIR"])
        own.mkdir(parents=True)
        (own / "kernel.ptx").touch()
        (cache.directory / "ptx").touch()  # no directory
        cache.keep()
        assert (cache.directory / "ptx").is_file() and (own / "kernel.ptx").exists()
