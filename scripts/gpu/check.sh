#!/usr/bin/env bash
# check.sh FOLDER [OUTPUT [NAME ...]]: unpacks the parts that bundle.sh has made, builds mlxdist, and runs check.py with
# two ranks on one GPU: 4 minutes, no network. OUTPUT, by default gpu-check: check.json and a log for each program.
# With - for FOLDER it checks the mlxdist that PYTHON has, on MLX's default device: the CPU, where there is no GPU.
set -euo pipefail

[ $# -ge 1 ] || { sed -n 's/^# //p' "$0" >&2 && exit 2; }
python=${PYTHON:-python3}
folder=$1
output=$(mkdir -p "${2:-gpu-check}" && cd "${2:-gpu-check}" && pwd)
shift $(($# < 2 ? $# : 2))
if [ "$folder" = - ]; then
  exec "$python" "$(dirname "$0")/check.py" "$output/check.json" "$@"
fi

step() { printf '%4d s  %s\n' "$SECONDS" "$1"; }

work=${WORK:-/tmp/mlxdist-gpu-check}
rm -rf "$work" && mkdir -p "$work/site"
step "unpack"
(cd "$folder" && sha256sum --quiet --check SHA256SUMS && cat part-*) | tar -C "$work" -xJ
mkdir "$work/mlxdist-source" && tar -C "$work/mlxdist-source" --strip-components=1 -xf "$work/mlxdist.tar"

step "install the packages that this Python lacks"
"$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$work/site" \
  "$work"/wheels/*.whl
export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
# libmlx looks for cuDNN, cuBLAS and others in the folder `nvidia` beside its own.
nvidia=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])')
ln -s "$nvidia" "$work/site/nvidia"
libraries="$work/site/mlx/lib/libmlx.so"
if ldd "$libraries" | grep 'not found' >"$output/missing-libraries.txt"; then
  cat "$output/missing-libraries.txt"
  # Those that neither lie there nor are known to the loader, such as the driver's.
  for name in $(awk '{ print $1 }' "$output/missing-libraries.txt"); do
    found=$(find / -name "$name" -not -path '/proc/*' -print -quit 2>/dev/null || true)
    [ -n "$found" ] || { echo "$name, which MLX needs, is not on this machine" >&2 && exit 1; }
    LD_LIBRARY_PATH="$(dirname "$found")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  done
  export LD_LIBRARY_PATH
fi
# MLX compiles fused kernels with the headers of CUDA.
[ -n "${CUDA_HOME:-}" ] || [ ! -d /usr/local/cuda ] || export CUDA_HOME=/usr/local/cuda

step "build mlxdist"
CMAKE_ARGS="-DMLX_ROOT=$work/site/mlx" "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --no-compile --target "$work/site" \
  "$work/mlxdist-source" >"$output/build.log" 2>&1 || { tail -40 "$output/build.log" && exit 1; }

step "check"
cd "$work"
status=0
"$python" "$work/mlxdist-source/scripts/gpu/check.py" "$output/check.json" "$@" || status=$?
step "done"
exit "$status"
