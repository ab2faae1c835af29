# The one table of what the bridge can be built with. MLX's Python module and ours share nanobind's
# internals, so nanobind must have the ABI of the one in MLX's wheel; and ours includes MLX's inline C++, so
# one binary serves only releases that kept it. An entry is one such binary:
#
#   nanobind version : the MLX versions it serves
#
# To add a release: build, run the tests on every MLX version of its entry, then widen the version
# ranges in pyproject.toml (a test compares them with this table).
set(MLX_PAIRS
  "3.1.0:0.32.3,0.32.4"
)

# Stops unless (mlx_version, nanobind_version) is in the table. Sets `${served}` to the MLX versions that
# the bridge will work with, comma-separated; the Python half checks them at import.
function(mlx_pairs_check mlx_version nanobind_version served)
  set(known "")
  foreach(entry IN LISTS MLX_PAIRS)
    string(REPLACE ":" ";" entry "${entry}")
    list(GET entry 0 nanobind)
    list(GET entry 1 versions)
    string(REPLACE "," ";" mlx_versions "${versions}")
    if(nanobind VERSION_EQUAL nanobind_version AND mlx_version IN_LIST mlx_versions)
      set(${served} "${versions}" PARENT_SCOPE)
      return()
    endif()
    list(GET mlx_versions -1 newest)
    string(APPEND known
      "  MLX ${versions} with nanobind ${nanobind}: pip install mlx==${newest} nanobind==${nanobind}\n")
  endforeach()
  message(FATAL_ERROR
    "mlxdist cannot be built with MLX ${mlx_version} and nanobind ${nanobind_version}: only these pairs have the "
    "same binary interface. Install one of them, then build with --no-build-isolation:\n${known}")
endfunction()
