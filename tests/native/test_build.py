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
from native_build import LAYERS, NATIVE, c_compiler, compile_source, directory_sources, layer_includes, layer_sources
from packaging.requirements import Requirement

from mlxdist.version import __version__

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
HEADER = ROOT / "native" / "include" / "mlxdist.h"
PAIRS = ROOT / "native" / "cmake" / "mlx_pairs.cmake"

# What each directory of native/ may include. Only the transport sees the providers, and of them their table alone: no
# collective can go around the verbs.
PROVIDERS = {"verbs", "providers", "providers/soft", "providers/soft/emulation"}
MAY_INCLUDE = {
    "verbs": {"verbs"},
    "providers": PROVIDERS,
    "providers/soft": PROVIDERS,
    "providers/soft/emulation": PROVIDERS,
    "transport": {"include", "verbs", "providers", "transport"},
    "engine": {"include", "verbs", "providers", "transport", "engine"},
    "reduce": {"include", "reduce"},
    "collectives": {"include", "verbs", "providers", "transport", "engine", "reduce", "collectives"},
    "bindings/softverbs": {"verbs", "providers", "providers/soft", "bindings/softverbs"},
    "bindings/mlx": {"include"},
    "bindings/mpi": {"include"},
}
NATIVE_FLAGS = ("-std=gnu11", "-O1", '-DMLXDIST_VERSION="0.0.0"', *layer_includes())


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


def check_pair(mlx: str, nanobind: str, directory: Path) -> list[object]:
    script = directory / "check.cmake"
    script.write_text(f'include("{PAIRS}")\nmlx_pairs_check({mlx} {nanobind} served)\nmessage("serves ${{served}}")\n')
    return [BIN / "cmake", "-P", script]


def test_every_pair_of_the_table_is_accepted(tmp_path):
    assert pairs()
    for mlx, nanobind in pairs():
        run(*check_pair(mlx, nanobind, tmp_path))


@pytest.mark.parametrize(
    "mlx, nanobind", [("0.32.5", "3.1.0"), ("0.32.4", "2.15.0"), ("0.31.2", "2.12.0"), ("0.32", "3.1.0")]
)
def test_every_other_pair_is_rejected(tmp_path, mlx, nanobind):
    output = fails(*check_pair(mlx, nanobind, tmp_path))
    assert f"cannot be built with MLX {mlx} and nanobind {nanobind}" in output
    newest, with_nanobind = pairs()[-1]
    assert f'pip install "{MLX}=={newest}" nanobind=={with_nanobind}' in output


def test_build_reads_the_table(tmp_path):
    """The whole configuration, with an MLX of another version in place of the installed one."""
    header = "".join(
        f"#define MLX_VERSION_{name} {number}\n" for name, number in (("MAJOR", 0), ("MINOR", 31), ("PATCH", 2))
    )
    (tmp_path / "include" / "mlx").mkdir(parents=True)
    (tmp_path / "include" / "mlx" / "version.h").write_text(header)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / f"libmlx.{'dylib' if sys.platform == 'darwin' else 'so'}").touch()
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


def test_mlx_of_another_version_is_rejected_at_import():
    output = fails(
        sys.executable, "-c", "import mlx.core as mx; mx.__version__ = '0.31.2'; import mlxdist; mlxdist.init()"
    )
    assert f"VersionMismatch: mlxdist {__version__}, as built here, fits MLX " in output
    assert ", but MLX 0.31.2 is installed" in output
    pip = f"{sys.executable} -m pip install"
    assert any(f"`{pip} {shlex.quote(f'{MLX}=={version}')}`" in output for version, _ in pairs())
    assert f"`{pip} --upgrade mlxdist {shlex.quote(f'{MLX}==0.31.2')}`" in output


def test_stale_build_is_rejected_at_import():
    code = "import mlxdist.version; mlxdist.version.__version__ = '9.9'; import mlxdist.runtime.native"
    output = fails(sys.executable, "-c", code)
    assert "VersionMismatch" in output and "the Python half 9.9" in output and "make setup" in output


def test_missing_build_names_the_build_command():
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
        directory = str(source.parent.relative_to(native))
        flags = [Path(path) for path in re.findall(r"-(?:I|isystem) ?(\S+)", entry["command"])]
        visible = {str(path.relative_to(native)) for path in flags if path.is_relative_to(native)}
        allowed = MAY_INCLUDE[directory] | {directory}
        assert visible <= allowed, f"{source} sees {visible - allowed}"
        included = {str(path.parent.relative_to(native)) for path in includes(source)}
        assert included <= allowed, f"{source} includes {included - allowed}"
        seen.add(directory)
    assert seen == set(MAY_INCLUDE)


def includes(file: Path) -> list[Path]:
    """The files of native/ that a file includes by name."""
    names = re.findall(r'^#include "([\w./]+)"$', file.read_text(), re.MULTILINE)
    directories = [file.parent, *(NATIVE / flag.removeprefix("-I") for flag in layer_includes())]
    found = [
        next((directory / name for directory in directories if (directory / name).exists()), None) for name in names
    ]
    return [path.resolve() for path in found if path]


def cycle(graph: dict[object, set]) -> list:
    """One cycle of the graph; empty where there is none."""
    done: set = set()
    for start in graph:
        path, stack = [], [(start, iter(graph[start]))]
        while stack and start not in done:
            node, successors = stack[-1]
            path = [of for of, _ in stack]
            following = next((one for one in successors if one not in done), None)
            if following in path:
                return [*path[path.index(following) :], following]
            if following is None:
                done.add(node)
                stack.pop()
            else:
                stack.append((following, iter(graph.get(following, ()))))
    return []


def test_no_cycle_of_includes():
    files = [
        file
        for directories in LAYERS.values()
        for directory in directories
        for file in (NATIVE / directory).glob("*.h")
    ]
    assert len(files) > 50
    assert cycle({file.resolve(): set(includes(file)) for file in files}) == []


def symbols(layer: str) -> dict[str, tuple[set[str], set[str]]]:
    """For each C file of a layer the functions and objects that it defines, and those that it takes from others."""
    found = {}
    for directory in LAYERS[layer]:
        for source in directory_sources(directory):
            lines = run("nm", compile_source(source, c_compiler(), NATIVE_FLAGS)).splitlines()
            names = [line.split()[-2:] for line in lines]
            defined = {name for kind, name in names if kind in "TDBRC"}
            found[f"{directory}/{source.name}"] = defined, {name for kind, name in names if kind == "U"}
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="nm of Linux")
@pytest.mark.long
def test_calls_go_down():
    """A layer calls itself and those below it; within a layer no files call each other in a cycle."""
    below: set[str] = set()
    everything = {name for layer in LAYERS for defined, _ in symbols(layer).values() for name in defined}
    for layer in LAYERS:
        files = symbols(layer)
        home = {name: file for file, (defined, _) in files.items() for name in defined}
        upward = {(file, name) for file, (_, used) in files.items() for name in used & everything - below - home.keys()}
        assert upward == set(), f"{layer} calls what is above it"
        calls = {file: {home[name] for name in used & home.keys()} - {file} for file, (_, used) in files.items()}
        assert cycle(calls) == [], f"in {layer} files call each other"
        below |= home.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="nm of Linux")
def test_functions_are_declared_in_the_header_of_their_file():
    """So that a reader sees in the headers that a file includes which files it calls."""
    public = HEADER.read_text() + (NATIVE / "providers" / "providers.h").read_text()
    for layer in ("providers", "transport", "engine", "collectives"):
        for file, (defined, _) in symbols(layer).items():
            header = NATIVE / re.sub(r"(_memfd|_posix|_abstract)?\.c$", lambda of: "_system.h" if of[1] else ".h", file)
            declared = public + (header.read_text() if header.exists() else "")
            assert [name for name in defined if not re.search(rf"\b{name}\b", declared)] == [], file


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's linker")
@pytest.mark.parametrize(
    ("layer", "upward"), [("verbs", "soft_find_mr"), ("transport", "engine_lock"), ("engine", "choose")]
)
def test_a_call_upward_does_not_link(tmp_path, layer, upward):
    source = tmp_path / "upward.c"
    for name, links in (("main_of_nothing", True), (upward, False)):
        body = "" if links else f"{name}();"
        source.write_text(f"void {name}(void);\nint main(void) {{ {body} return 0; }}\n")
        objects = [compile_source(one, c_compiler(), NATIVE_FLAGS) for one in layer_sources(layer)]
        command = [*c_compiler(), source, *objects, "-o", tmp_path / "program", "-lpthread", "-ldl"]
        if links:
            run(*command)
        else:
            assert f"undefined reference to `{upward}'" in fails(*command)
