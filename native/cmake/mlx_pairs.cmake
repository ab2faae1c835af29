# The one table of what the bridge can be built with. MLX's Python module and ours share nanobind's
# internals, so nanobind must have the ABI of the one in MLX's wheel; and ours includes MLX's inline C++, so
# one binary serves only releases that kept it: 0.32.4 has another array::set_data than 0.32.3, and its
# is_donatable reads a member that 0.32.3 does not have. An entry is one such binary:
#
#   nanobind version : the MLX versions it serves
#
# To add a release: build, run the tests with that one binary on every MLX version of its entry, then name the
# versions of the last entry, which is that of the wheels, in pyproject.toml (a test compares).
set(MLX_PAIRS
  "3.1.0:0.32.3"
  "3.1.0:0.32.4"
)

# Stops unless (mlx_version, nanobind_version) is in the table. Sets `${served}` to the MLX versions that
# the bridge will work with, comma-separated; the Python half checks them at import.
function(mlx_pairs_check mlx_version nanobind_version served)
  set(known "")
  set(package mlx)
  if(CMAKE_HOST_SYSTEM_NAME STREQUAL Linux) # there libmlx comes with an extra
    set(package "mlx[cpu]")
  endif()
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
      "  MLX ${versions} with nanobind ${nanobind}: pip install \"${package}==${newest}\" nanobind==${nanobind}\n")
  endforeach()
  message(FATAL_ERROR
    "mlxdist cannot be built with MLX ${mlx_version} and nanobind ${nanobind_version}: only these pairs have the "
    "same binary interface. Install one of them, then build with --no-build-isolation:\n${known}")
endfunction()
