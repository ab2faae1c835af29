# Toolchain of `make check-macos`: compiles for macOS on arm64 on any machine, with the clang and the macOS headers of
# the PyPI package ziglang. Set Python_EXECUTABLE to a Python that has it.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES Python_EXECUTABLE)
foreach(language IN ITEMS C CXX)
  string(REPLACE "CXX" "c++" command "${language}")
  string(REPLACE "C" "cc" command "${command}")
  set(CMAKE_${language}_COMPILER "${Python_EXECUTABLE}" -m ziglang ${command} -target aarch64-macos)
endforeach()
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_INSTALL_NAME_TOOL true) # CMake insists on one; nothing is installed
