"""The build: in a fresh environment, for exactly the MLX versions of the table, exporting exactly mlxdist.h."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mlxdist.version import __version__

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
HEADER = ROOT / "native" / "include" / "mlxdist.h"
PAIRS = ROOT / "native" / "cmake" / "mlx_pairs.cmake"

# What each directory of native/ may include. Only a provider sees a provider: no collective can go around the verbs.
LAYERS = {
    "verbs": {"verbs"},
    "providers/soft": {"verbs", "providers/soft"},
    "bindings/softverbs": {"verbs", "providers/soft", "bindings/softverbs"},
    "reduce": {"include", "reduce"},
    "endpoint": {"include", "verbs", "endpoint"},
    "collectives": {"include", "verbs", "endpoint", "reduce", "collectives"},
    "bindings/mlx": {"include"},
    "bindings/mpi": {"include"},
}


def run(*command: object, timeout: float = 60) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


def fails(*command: object) -> str:
    """The output of a command that must not succeed, in one line."""
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert result.returncode != 0, f"{command} succeeded\n{result.stdout}"
    return " ".join((result.stdout + result.stderr).split())


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def entries() -> list[tuple[str, list[str]]]:
    """nanobind version and MLX versions of each entry in the table. The wheels are built for the last one."""
    found = re.findall(r'^ +"([0-9.]+):([0-9.,]+)"$', PAIRS.read_text(), re.MULTILINE)
    return [(nanobind, versions.split(",")) for nanobind, versions in found]


def pairs() -> list[tuple[str, str]]:
    """(MLX version, nanobind version) for each pair in the table."""
    return [(mlx, nanobind) for nanobind, versions in entries() for mlx in versions]


# What brings libmlx of a version.
MLX = "mlx[cpu]" if sys.platform == "linux" else "mlx"


def check_pair(mlx: str, nanobind: str, folder: Path) -> list[object]:
    script = folder / "check.cmake"
    script.write_text(f'include("{PAIRS}")\nmlx_pairs_check({mlx} {nanobind} served)\nmessage("serves ${{served}}")\n')
    return [BIN / "cmake", "-P", script]


def test_every_pair_of_the_table_is_accepted(tmp_path):
    assert pairs()
    for mlx, nanobind in pairs():
        run(*check_pair(mlx, nanobind, tmp_path))


@pytest.mark.parametrize(
    "mlx, nanobind", [("0.32.5", "3.1.0"), ("0.32.4", "2.15.0"), ("0.31.2", "2.12.0"), ("0.32", "3.1.0")]
)
def test_every_other_pair_is_refused(tmp_path, mlx, nanobind):
    output = fails(*check_pair(mlx, nanobind, tmp_path))
    assert f"cannot be built with MLX {mlx} and nanobind {nanobind}" in output
    newest, with_nanobind = pairs()[-1]
    assert f'pip install "{MLX}=={newest}" nanobind=={with_nanobind}' in output


def test_build_asks_the_table(tmp_path):
    """The whole configuration, with an MLX of another version in place of the installed one."""
    (tmp_path / "MLXConfig.cmake").write_text("set(MLX_LIBRARIES mlx)\n")
    (tmp_path / "MLXConfigVersion.cmake").write_text(
        'set(PACKAGE_VERSION "0.31.2")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n'
    )
    configure = [BIN / "cmake", "-S", ROOT / "native", "-B", tmp_path / "build", "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"]
    output = fails(*configure, "-DSKBUILD_PROJECT_VERSION=0", f"-DMLX_ROOT={tmp_path}")
    assert "cannot be built with MLX 0.31.2 and nanobind" in output


def test_versions_in_pyproject_are_those_of_the_last_entry():
    project = pyproject()
    requirements = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    mlx = [Requirement(r).specifier for r in requirements if Requirement(r).name == "mlx"]
    nanobind = [Requirement(r).specifier for r in requirements if Requirement(r).name == "nanobind"]
    with_nanobind, served = entries()[-1]
    candidates = {f"0.{minor}.{patch}" for minor in range(28, 36) for patch in range(12)} | set(served)
    for specifier in mlx:
        assert {version for version in candidates if version in specifier} == set(served), specifier
    assert len(mlx) == 4 and len(nanobind) == 1  # Linux and macOS, at run time and at build time
    assert with_nanobind in nanobind[0]


def test_the_page_of_installation_has_the_table():
    page = (ROOT / "docs" / "install.md").read_text()
    wheels, source = (", ".join(versions) for versions in (entries()[-1][1], [version for version, _ in pairs()]))
    assert f"\n| {__version__} | {wheels} | {source} |\n" in page


def test_mlx_of_another_version_is_refused_at_import():
    output = fails(
        sys.executable, "-c", "import mlx.core as mx; mx.__version__ = '0.31.2'; import mlxdist; mlxdist.init()"
    )
    assert f"VersionMismatch: mlxdist {__version__}, as built here, fits MLX " in output
    assert ", but MLX 0.31.2 is installed" in output
    pip = f"{sys.executable} -m pip install"
    assert any(f"`{pip} {shlex.quote(f'{MLX}=={version}')}`" in output for version, _ in pairs())
    assert f"`{pip} --upgrade mlxdist {shlex.quote(f'{MLX}==0.31.2')}`" in output


def test_stale_build_is_refused_at_import():
    code = "import mlxdist.version; mlxdist.version.__version__ = '9.9'; import mlxdist.runtime.native"
    output = fails(sys.executable, "-c", code)
    assert "VersionMismatch" in output and "the Python half 9.9" in output and "make setup" in output


def test_missing_build_says_how_to_build():
    code = "import sys; sys.modules['mlxdist._native'] = None; import mlxdist; mlxdist.all_sum"
    output = fails(sys.executable, "-c", code)
    assert "ImportError: mlxdist's compiled half does not load" in output and "make setup" in output


def test_library_exports_the_functions_of_the_header_and_nothing_else():
    declarations = HEADER.read_text().split("/* cffi begins */")[1].split("/* cffi ends */")[0]
    declared = set(re.findall(r"^[\w *]+?\b(mlxdist_\w+)\(", declarations, re.MULTILINE))
    package = Path(importlib.util.find_spec("mlxdist._native").origin).parent
    if sys.platform == "darwin":
        symbols = run("nm", "-gU", package / "libmlxdist.dylib").replace(" _mlxdist", " mlxdist")
    else:
        symbols = run("nm", "-D", "--defined-only", package / "libmlxdist.so")
    assert {line.split()[-1] for line in symbols.splitlines()} == declared
    assert len(declared) > 20


def test_layers_include_only_what_is_below_them(tmp_path):
    scripts = Path(sys.executable).parent
    cmake = [scripts / "cmake", "-S", ROOT / "native", "-B", tmp_path, "-G", "Ninja", "-DSKBUILD_PROJECT_VERSION=0"]
    run(*cmake, f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}")
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    native = ROOT / "native"
    seen = set()
    for entry in commands:
        source = Path(entry["file"])
        if not source.is_relative_to(native):
            continue
        folder = str(source.parent.relative_to(native))
        included = [Path(path) for path in re.findall(r"-(?:I|isystem) ?(\S+)", entry["command"])]
        own = {str(path.relative_to(native)) for path in included if path.is_relative_to(native)}
        assert own <= LAYERS[folder], f"{source} sees {own - LAYERS[folder]}"
        seen.add(folder)
    assert seen == set(LAYERS)
