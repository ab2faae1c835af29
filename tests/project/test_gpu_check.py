"""MLX's CUDA wheel and scripts/gpu, without a GPU: what the bridge needs of libmlx; the check on the CPU backend."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from mlxdist.runtime.native import MLX_VERSIONS

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cuda_mlx(tmp_path_factory):
    """The folder `mlx` of the CUDA wheel, which PyPI has for x86-64 and aarch64."""
    folder = tmp_path_factory.mktemp("cuda")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", folder, f"mlx-cuda-13=={MLX_VERSIONS[-1]}"], check=True, timeout=300)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder / "mlx"


def symbols(library: Path, which: str) -> set[str]:
    output = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in output.splitlines()}


def test_the_bridge_links_against_the_cuda_wheel(cuda_mlx, tmp_path):
    """Configured and built against it, with neither CUDA nor cuDNN: all it needs of MLX is there."""
    build = [BIN / "cmake", "-S", ROOT / "native", "-B", tmp_path, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    build += [f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"]
    build += ["-DSKBUILD_PROJECT_VERSION=0", f"-DMLX_ROOT={cuda_mlx}"]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    subprocess.run([BIN / "ninja", "-C", tmp_path, "_bridge"], check=True, capture_output=True, timeout=900)
    bridge = tmp_path / f"_bridge{sysconfig.get_config_var('EXT_SUFFIX')}"
    needed = {name for name in symbols(bridge, "--undefined-only") if "3mlx4core" in name}
    assert len(needed) > 20 and needed <= symbols(cuda_mlx / "lib" / "libmlx.so", "--defined-only")


def test_headers_are_those_of_the_cpu_wheel(cuda_mlx):
    """The bridge contains MLX's inline code: one build serves both wheels because it is the same."""
    import mlx.core

    here, there = Path(mlx.core.__file__).parent / "include" / "mlx", cuda_mlx / "include" / "mlx"
    names = {path.relative_to(here) for path in here.rglob("*.h")}
    assert len(names) > 50
    for name in names:
        assert (here / name).read_bytes() == (there / name).read_bytes(), name


def test_the_check_on_the_cpu_backend(tmp_path):
    variables = os.environ | {
        "GPU_CHECK_PATIENCE": "5",
        "PYTHON": sys.executable,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    names = ("streams", "chain", "layers", "tokens", "training", "served", "mlx_operations")
    command = ["bash", ROOT / "scripts" / "gpu" / "check.sh", "-", tmp_path, *names]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=1200)
    report = json.loads((tmp_path / "check.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: one["status"] for name, one in report["concerns"].items()} == dict.fromkeys(names, "passed")
    assert report["machine"]["device"] == "Device(cpu, 0)"
    streams = report["concerns"]["streams"]["figures"]
    assert all(value == 0 for name, value in streams.items() if "wrong" in name), streams
    assert all((tmp_path / f"{name}.log").exists() for name in names)
