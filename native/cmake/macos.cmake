# Toolchain of `make check-macos`: compiles for macOS on arm64 on any machine, with the clang and the macOS headers of
# the PyPI package ziglang, and has scripts/macos stand in for Apple's linker. Set Python_EXECUTABLE to a Python that
# has ziglang.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(MACOS_VERSION 14.0 CACHE STRING "the oldest macOS that the products shall run on")
set(MACOS_SDK "" CACHE PATH "the directory of stubs that scripts/macos/sdk.py writes")
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES Python_EXECUTABLE MACOS_VERSION MACOS_SDK)
foreach(language IN ITEMS C CXX)
  string(REPLACE "CXX" "c++" command "${language}")
  string(REPLACE "C" "cc" command "${command}")
  set(CMAKE_${language}_COMPILER "${Python_EXECUTABLE}" -m ziglang ${command} -target aarch64-macos.${MACOS_VERSION})
  # CMake shall write what it writes on a Mac. To find this out it would link a program: zig compiles libc++ for that.
  set(CMAKE_${language}_COMPILER_ID_RUN TRUE)
  set(CMAKE_${language}_COMPILER_ID AppleClang)
  set(CMAKE_${language}_COMPILER_VERSION 17.0)
  set(CMAKE_${language}_STANDARD_COMPUTED_DEFAULT 17)
  set(CMAKE_${language}_EXTENSIONS_COMPUTED_DEFAULT ON)
  set(CMAKE_${language}_COMPILER_FRONTEND_VARIANT GNU)
  set(CMAKE_${language}_LINKER_LAUNCHER
    "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/../../scripts/macos/link.py" "${MACOS_SDK}" ${MACOS_VERSION})
  # The ar of Linux makes no index of symbols of macOS.
  set(CMAKE_${language}_ARCHIVE_CREATE "\"${Python_EXECUTABLE}\" -m ziglang ar qc <TARGET> <OBJECTS>")
  set(CMAKE_${language}_ARCHIVE_FINISH "\"${Python_EXECUTABLE}\" -m ziglang ranlib <TARGET>")
endforeach()
# zig brings its own libc++. Apple's headers use of a libc++ what the oldest macOS has, and so do these then.
set(CMAKE_CXX_FLAGS_INIT
  "-U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS -D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1")
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_INSTALL_NAME_TOOL true) # CMake insists on one; nothing is installed
