"""What cibuildwheel runs before each build on Linux: `python unpack_mlx.py FOLDER`.

Installs what the build requires, but for MLX: its wheels are for a newer glibc than that of the manylinux images, so
pip does not install them there. libmlx and its headers are unpacked into FOLDER; CMake takes them by MLX_ROOT.
"""

import platform
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

MLX = "mlx[cpu]"


def main() -> None:
    directory = Path(sys.argv[1])
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    requires = pyproject["build-system"]["requires"]
    (version,) = [r.removeprefix(MLX).partition(";")[0] for r in requires if r.startswith(MLX)]
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "install", *(r for r in requires if not r.startswith("mlx"))], check=True)
    tag = f"manylinux_2_35_{platform.machine()}"
    download = ["download", "--no-deps", "--only-binary", ":all:", "--platform", tag, "--dest", directory]
    subprocess.run([*pip, *download, f"mlx-cpu{version}"], check=True)
    for wheel in directory.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(directory)


if __name__ == "__main__":
    main()
