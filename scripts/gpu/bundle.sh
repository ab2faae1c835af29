#!/usr/bin/env bash
# bundle.sh [--part-size BYTES] [FOLDER]: what check.sh needs on a Linux machine without a network, in parts that can be
# sent one after the other: MLX for CUDA 13, mlx-lm, what builds mlxdist, and mlxdist as it is committed here.
#
# The machine has x86-64, glibc 2.35, a driver for CUDA 13, a C++ compiler, cmake, ninja, and a Python 3.12 with the
# packages of PyTorch for CUDA 13 (nvidia-*, which MLX links), transformers and numpy.
set -euo pipefail

part_size=58000000
while [ $# -gt 0 ]; do
  case $1 in
  --part-size) part_size=$2 && shift 2 ;;
  -*) sed -n 's/^# //p' "$0" | head -n 2 >&2 && exit 2 ;;
  *) break ;;
  esac
done
root=$(cd "$(dirname "$0")/../.." && pwd)
output=${1:-$root/build/gpu}
python=${PYTHON:-python3}
staging=$(mktemp -d)
trap 'rm -rf "$staging"' EXIT
mkdir -p "$output" "$staging/wheels"
rm -f "$output"/part-* "$output"/SHA256SUMS

# The versions that pyproject.toml names, and for the rest those of constraints.txt. Without what they need: the machine
# has most of it, and the nvidia-* packages alone are gigabytes.
"$python" - "$root" >"$staging/requirements.txt" <<'PYTHON'
import re, sys, tomllib
from pathlib import Path

pyproject = tomllib.loads((Path(sys.argv[1]) / "pyproject.toml").read_text())
project = pyproject["project"]
lines = [*pyproject["build-system"]["requires"], *project["dependencies"], *project["optional-dependencies"]["lm"]]
named = {re.split(r"[^\w.-]", line, maxsplit=1)[0]: line.partition(";")[0] for line in lines}
mlx = named.pop("mlx").partition("==")[2]
for there in ("cmake", "ninja", "numpy", "tokenizers"):
    del named[there]
print(f"mlx=={mlx}", f"mlx-cuda-13=={mlx}", *named.values(), sep="\n")
print("pycparser", "pydantic-core", "annotated-types", "typing-inspection", "h11", sep="\n")  # that those need
PYTHON
platforms=(--platform manylinux2014_x86_64)
for glibc in 17 24 26 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
"$python" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: --python-version 3.12 \
  --implementation cp "${platforms[@]}" --constraint "$root/constraints.txt" \
  --requirement "$staging/requirements.txt" --dest "$staging/wheels"
git -C "$root" archive --format=tar --prefix=mlxdist/ HEAD >"$staging/mlxdist.tar"

tar -C "$staging" -c wheels mlxdist.tar | xz -T0 -6 | split --bytes="$part_size" --numeric-suffixes - "$output/part-"
(cd "$output" && sha256sum part-* >SHA256SUMS)
ls -l "$output"
echo "Copy part-* and SHA256SUMS into one folder of the machine, and run there: bash check.sh FOLDER"
