# The target `mlx` and MLX_VERSION, from MLX_ROOT: the folder that holds include and lib, or that of MLX's CMake files.
# Not MLX's own package file: that of the CUDA wheels requires a CUDA toolkit and the headers of cuDNN, and the bridge
# includes none of them. It is the same binary for MLX's CPU and CUDA wheels, whose headers are equal.
find_path(MLX_INCLUDE_DIR mlx/version.h PATHS "${MLX_ROOT}" "${MLX_ROOT}/../../.."
          PATH_SUFFIXES include NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH)
find_library(MLX_LIBRARY mlx PATHS "${MLX_ROOT}" "${MLX_ROOT}/../../.."
             PATH_SUFFIXES lib NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH)
if(NOT MLX_INCLUDE_DIR OR NOT MLX_LIBRARY)
  message(FATAL_ERROR
    "MLX_ROOT is ${MLX_ROOT}, and neither this folder nor the one three above it has include/mlx/version.h and "
    "lib/libmlx. On Linux install `mlx[cpu]` or `mlx[cuda13]`: `mlx` alone has neither.")
endif()

file(READ "${MLX_INCLUDE_DIR}/mlx/version.h" header)
foreach(number MAJOR MINOR PATCH)
  string(REGEX MATCH "MLX_VERSION_${number} ([0-9]+)" found "${header}")
  list(APPEND MLX_VERSION "${CMAKE_MATCH_1}")
endforeach()
list(JOIN MLX_VERSION "." MLX_VERSION)

add_library(mlx SHARED IMPORTED)
set_target_properties(mlx PROPERTIES
  IMPORTED_LOCATION "${MLX_LIBRARY}"
  INTERFACE_INCLUDE_DIRECTORIES "${MLX_INCLUDE_DIR}"
  INTERFACE_COMPILE_FEATURES cxx_std_20)
