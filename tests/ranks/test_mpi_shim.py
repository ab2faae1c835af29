"""The MPI shim: programs that know nothing of mlxdist run on it under `mlxdist launch`, or fail; never alone."""

import ctypes.util
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from guides import program_of
from native_build import build_program

from mlxdist.base.errors import ResourceError
from mlxdist.cli import commands
from mlxdist.runtime import mpi_shim

LIBRARY = mpi_shim.find_library()
SYMBOLS = {*mpi_shim.FUNCTIONS, *mpi_shim.OBJECTS}
READERS = ["eval", "np.sqrt"]
READERS += [pytest.param(reader, marks=pytest.mark.long) for reader in ("tolist", "np.array", "np.asarray")]


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4))])
def test_every_operation_on_every_dtype(run_ranks, ranks):
    for rank, output in enumerate(run_ranks("mpi_shim_operations.py", ranks, "world", timeout=120)):
        assert f"exact {rank} of {ranks}" in output


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4))])
def test_every_operation_in_two_halves_at_once(run_ranks, ranks):
    for rank, output in enumerate(run_ranks("mpi_shim_operations.py", ranks, "split", timeout=120)):
        assert f"exact {rank} of {ranks}" in output


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_streams(run_ranks, ranks):
    assert all("as expected" in output for output in run_ranks("mpi_shim.py", ranks, "two_streams"))


def test_two_streams_of_functions_imported_before_are_a_mismatch(run_ranks):
    for output in run_ranks("mpi_shim.py", 2, "two_streams_imported_before", status=1):
        assert re.search(r"Mismatch: ranks disagree: .* in mx.distributed in CPU stream [12]", output), output


@pytest.mark.parametrize("scenario", ["messages_imported_before", "messages_of_threads"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_have_one_order(run_ranks, scenario, ranks):
    assert all("as expected" in output for output in run_ranks("mpi_shim.py", ranks, scenario))


@pytest.mark.parametrize(
    "scenario",
    [
        *("layers", "graphs", "pending_at_exit", "groups_let_go", "cannot_import"),
        *(
            pytest.param(scenario, marks=pytest.mark.long)
            for scenario in (
                "pending_behind_work_at_exit",
                "pending_in_a_stream_at_exit",
                "without_streams_at_exit",
                "forked",
                "middle_of_an_element",
                "no_color",
                "split_after_async",
                "in_a_part",
            )
        ),
    ],
)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_plain_mlx_programs(run_ranks, scenario, ranks):
    for output in run_ranks("mpi_shim.py", ranks, scenario):
        assert "as expected" in output
        assert "Traceback" not in output and "mlxdist:" not in output


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.long)])
def test_16_bit_sums_are_accumulated_in_float32(run_ranks, ranks):
    assert all("as expected" in output for output in run_ranks("mpi_shim.py", ranks, "accumulates_in_float32"))


@pytest.mark.parametrize("reader", READERS)
def test_failed_operation_is_never_read(run_ranks, reader):
    assert all("as expected" in output for output in run_ranks("mpi_shim.py", 2, "reader", reader))


@pytest.mark.parametrize("first", ["mlx", "mlxdist"])
def test_shim_and_mlxdist_share_a_world(run_ranks, first):
    for output in run_ranks("mpi_shim.py", 3, "shim_and_mlxdist", environment={"FIRST": first}):
        assert "as expected" in output


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_has_an_order_of_its_own(run_ranks, ranks):
    assert all("as expected" in output for output in run_ranks("mpi_shim.py", ranks, "orders_of_their_own"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_a_program_that_calls_mlxdist_does_not_load_the_library(run_ranks):
    assert all("as expected" in output for output in run_ranks("mpi_shim.py", 2, "mlxdist_alone"))


@pytest.mark.parametrize("scenario", ["killed", "killed_during_split"])
def test_a_killed_rank_is_noticed(run_ranks, scenario):
    outputs = run_ranks("mpi_shim.py", 3, scenario, status=128 + 9)
    for output in outputs[:2]:
        assert float(re.search(r"lost after ([0-9.]+) s", output)[1]) < 2


def test_a_rank_that_raises_ends_the_job(run_ranks):
    outputs = run_ranks("mpi_shim.py", 3, "raises", status=1)
    assert "ValueError: this rank's own mistake" in outputs[2]
    for output in outputs[:2]:
        assert re.search(r"mlxdist\.(PeerLost|Aborted): .*rank 2", output)


@pytest.mark.long
def test_a_rank_that_cannot_join_is_an_error_on_every_rank(run_ranks):
    outputs = run_ranks("mpi_shim.py", 3, "cannot_join", status=1, environment={"MLXDIST_RENDEZVOUS_TIMEOUT": "2"})
    assert outputs[2].count("EnvironmentVariableError: MLXDIST_TIMEOUT='soon' is not a number of seconds") == 2
    for output in outputs[:2]:
        assert re.search(r"^(RendezvousError|PeerLost): .*(rank 2|rank 0 has ended)", output, re.MULTILINE)
    assert not any("a group of" in output for output in outputs)


def test_the_program_of_the_page(run_ranks, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "mpi-shim.md"
    for rank, output in enumerate(run_ranks(program_of(page, tmp_path), 2)):
        assert f"    [{rank}] {output}" in page.read_text()


def plain(code: str, **variables: str) -> subprocess.CompletedProcess:
    """Python without a launcher."""
    environ = os.environ | variables
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)


def test_without_a_launcher_there_is_nothing_to_join():
    code = "import mlx.core as mx, sys; print(mx.distributed.init().size(), 'mlxdist' in sys.modules)"
    assert plain(code, MLX_MPI_LIBNAME=str(LIBRARY)).stdout == "1 False\n"
    strict = plain("import mlx.core as mx; mx.distributed.init(strict=True)", MLX_MPI_LIBNAME=str(LIBRARY))
    assert strict.returncode != 0 and "initialize" in strict.stderr


def test_importing_mlxdist_does_not_load_the_library():
    if sys.platform != "linux":
        pytest.skip("reads /proc/self/maps")
    code = "import mlxdist; mlxdist.init(); print('libmlxdist_mpi' in open('/proc/self/maps').read())"
    assert plain(code, MLX_MPI_LIBNAME=str(LIBRARY)).stdout == "False\n"


def test_one_rank_is_a_group_of_one(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import mlx.core as mx\n"
        "print('size', mx.distributed.init().size(), mx.distributed.all_sum(mx.ones(3)).tolist())\n"
        "try: mx.distributed.init(strict=True, backend='mpi')\n"
        "except RuntimeError as error: print(error)\n"
        "import mlxdist\n"
        "print(mlxdist.init(strict=True).size())\n"
    )
    first, refused, strict = run_ranks(program, 1)[0].splitlines()
    assert (first, strict) == ("size 1 [1.0, 1.0, 1.0]", "1")
    assert refused == "Cannot initialize MPI", "MLX's own rule: docs/mpi-shim.md"


def test_another_library_named_by_the_user_is_used(run_ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import mlx.core as mx; print('size', mx.distributed.init().size())")
    command = [sys.executable, "-m", "mlxdist", "launch", "-n", "2", "--env", "MLX_MPI_LIBNAME=/no/such/library", "--"]
    result = subprocess.run([*command, sys.executable, program], capture_output=True, text=True, timeout=60)
    assert sorted(result.stdout.splitlines()) == ["[0] size 1", "[1] size 1"]


@pytest.mark.parametrize("order", ["first", "last"])
def test_next_to_another_mpi(run_ranks, tmp_path, order):
    """Each library uses its own names. Ours wrote into the other's objects, and gave it its own."""
    source = Path(__file__).parents[1] / "fixtures" / "another_mpi.c"
    library = build_program(tmp_path / "libanother_mpi.so", [source], ["-fPIC", "-shared"])
    assert run_ranks("another_mpi.py", 2, order, library) == ["as expected\n"] * 2


@pytest.mark.long
@pytest.mark.parametrize("order", ["first", "last"])
def test_next_to_mpi4py(run_ranks, order):
    if importlib.util.find_spec("mpi4py") is None or ctypes.util.find_library("mpi") is None:
        pytest.skip("needs mpi4py and Open MPI's libmpi, which are no dependencies: pip install mpi4py")
    assert run_ranks("another_mpi.py", 2, order, "mpi4py") == ["as expected\n"] * 2


def test_exports_what_mlx_looks_up_and_nothing_else():
    mpi_shim.check(LIBRARY)
    assert (len(mpi_shim.FUNCTIONS), len(mpi_shim.OBJECTS), len(SYMBOLS)) == (14, 16, 30)
    if sys.platform == "darwin":
        lines = run("nm", "-gU", LIBRARY).replace(" _", " ").splitlines()
    else:
        lines = run("nm", "-D", "--defined-only", LIBRARY).splitlines()
    assert {line.split()[-1] for line in lines} == SYMBOLS


def test_is_linked_to_the_engine_and_to_no_python():
    needed = run("otool", "-L", LIBRARY) if sys.platform == "darwin" else run("readelf", "-d", LIBRARY)
    assert "libmlxdist." in needed and "python" not in needed.lower() and "libmlx." not in needed


def run(*command: object) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture
def incomplete_library(tmp_path) -> Path:
    """Has all names but two."""
    names = sorted(SYMBOLS - {"MPI_Recv", "ompi_mpi_op_max"})
    source = tmp_path / "incomplete.c"
    source.write_text("".join(f"int {name};\n" for name in names))
    return build_program(tmp_path / "libincomplete.so", [source], ["-fPIC", "-shared"])


def test_a_missing_symbol_is_named(incomplete_library):
    with pytest.raises(ResourceError, match="does not export MPI_Recv, ompi_mpi_op_max") as refused:
        mpi_shim.check(incomplete_library)
    assert "make setup" in str(refused.value)


@pytest.mark.parametrize("missing", [True, False])
def test_no_rank_is_started_with_a_broken_shim(monkeypatch, tmp_path, incomplete_library, missing):
    path = tmp_path / "nothing.so" if missing else incomplete_library
    monkeypatch.setattr(mpi_shim, "find_library", lambda: path)
    job = CliRunner().invoke(commands, ["launch", "-n", "2", "--", "touch", str(tmp_path / "started")])
    assert job.exit_code == 1
    assert str(path) in job.stderr and "would run as groups of one" in job.stderr
    assert not (tmp_path / "started").exists()


def test_a_process_without_python_is_reported(tmp_path):
    """A program in C++ that MLX's C++ half would be part of."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    source = tmp_path / "program.cpp"
    source.write_text(
        "#include <cstdio>\n#include <dlfcn.h>\n#include <stdexcept>\n"
        "int main(int, char** arguments) {\n"
        "  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL);\n"
        '  auto* init = reinterpret_cast<int (*)(int*, char***)>(dlsym(library, "MPI_Init"));\n'
        "  try { return init(nullptr, nullptr); }\n"
        "  catch (const std::runtime_error& error) { puts(error.what()); return 77; }\n"
        "}\n"
    )
    program = tmp_path / "program"
    run(compiler, "-std=c++17", source, "-o", program, *(["-ldl"] if sys.platform == "linux" else []))
    environ = os.environ | {"MLXDIST_WORLD_SIZE": "2", "MLXDIST_RANK": "0"}
    result = subprocess.run([program, LIBRARY], env=environ, capture_output=True, text=True, timeout=60)
    assert result.returncode == 77
    assert result.stdout.startswith("[mlxdist 1] mx.distributed: this process has no Python interpreter")
