"""`make check-macos`: compiles and links mlxdist as a Mac would, against MLX's wheels for macOS."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import mlx.core
from link import find_lld
from sdk import make_sdk

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "macos"
_VERSIONS = ("14.0", "26.0")
_PYTHON = "3.12"  # of the wheels; those of other Pythons have the same libraries


def fetch(version: str) -> Path:
    """The directory with MLX's wheels for a macOS, unpacked; 45 to 80 MB, taken from PyPI once."""
    release, platform = mlx.core.__version__, f"macosx_{version.replace('.', '_')}_arm64"
    directory = BUILD / f"mlx-{release}-{platform}"
    if directory.exists():
        return directory
    what = ["--no-deps", "--only-binary", ":all:", "--platform", platform, "--python-version", _PYTHON]
    names = [f"mlx=={release}", f"mlx-metal=={release}"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    begun = directory.with_name(directory.name + ".part")
    with tempfile.TemporaryDirectory() as wheels:
        if subprocess.run([*pip, *what, "--dest", wheels, *names], check=False).returncode:
            raise SystemExit(f"make check-macos needs {' and '.join(names)} for {platform}: pip must reach PyPI once")
        for wheel in Path(wheels).iterdir():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(begun, [name for name in archive.namelist() if not name.endswith(".metallib")])
    begun.rename(directory)
    return directory


def main() -> int:
    lld = find_lld()
    print("linked by " + " ".join(lld) if lld else "not linked: there is no ld64.lld (Debian: apt-get install lld)")
    statuses = [check(version) for version in _VERSIONS]  # all are checked; below 0: ninja was killed
    return int(any(statuses))


def check(version: str) -> int:
    print(f"--- macOS {version}, MLX {mlx.core.__version__}", flush=True)
    wheels = fetch(version)
    sdk = BUILD / f"sdk-{version}"
    make_sdk(sdk, [*wheels.glob("mlx/lib/*.dylib"), *wheels.glob("mlx/*.so")])
    tools = Path(sys.executable).parent
    build = BUILD / version
    configure = [tools / "cmake", "-S", ROOT / "native", "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DCMAKE_TOOLCHAIN_FILE=cmake/macos.cmake"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DMLX_ROOT={wheels / 'mlx'}", f"-DMACOS_VERSION={version}"]
    configure += [f"-DMACOS_SDK={sdk}", "-DSKBUILD_PROJECT_VERSION=0"]
    subprocess.run([*configure, "--log-level=WARNING", "-Wno-unused-cli"], check=True)
    for product in [*build.glob("*.dylib"), *build.glob("*.so")]:
        product.unlink()  # ninja does not know what link.py reads
    return subprocess.run([tools / "ninja", "-C", build, "-k", "0", "--quiet"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
