# Compiles for another system with zig, which brings the headers and C libraries of all of them
# (the package ziglang).
#
#   EMBEDLM_ZIG=/path/to/zig EMBEDLM_TARGET=x86_64-windows-gnu cmake -DCMAKE_TOOLCHAIN_FILE=.ci/zig.cmake ...
if(NOT DEFINED ENV{EMBEDLM_ZIG} OR NOT DEFINED ENV{EMBEDLM_TARGET})
  message(FATAL_ERROR "zig.cmake: set EMBEDLM_ZIG to zig's program, and EMBEDLM_TARGET to its name of the system")
endif()
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "$ENV{EMBEDLM_TARGET}")
if("$ENV{EMBEDLM_TARGET}" MATCHES "windows")
  set(CMAKE_SYSTEM_NAME Windows)
elseif("$ENV{EMBEDLM_TARGET}" MATCHES "macos")
  set(CMAKE_SYSTEM_NAME Darwin)
else()
  set(CMAKE_SYSTEM_NAME Linux)
endif()
# zig writes debug information unless it is told not to: 28 of 33 MB of a library for Linux, of which its C++
# library brings a part. The names of functions stay.
set(CMAKE_CXX_FLAGS_INIT "-g0")
# zig's C++ library offers its `operator new` and `delete` to the whole process otherwise.
if(CMAKE_SYSTEM_NAME STREQUAL "Darwin")
  # zig 0.17's linker knows no list of symbols for macOS: -exported_symbols_list changes nothing.
  set(EMBEDLM_HIDDEN_NEW ON)
elseif(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  file(WRITE "${CMAKE_BINARY_DIR}/exports.map" "{ global: embedlm_*; local: *; };\n")
  set(CMAKE_MODULE_LINKER_FLAGS_INIT "-Wl,--strip-debug -Wl,--version-script=${CMAKE_BINARY_DIR}/exports.map")
endif()
# CMake takes programs without arguments.
set(tools "${CMAKE_BINARY_DIR}/zig")
file(MAKE_DIRECTORY "${tools}")
foreach(tool IN ITEMS c++ ar ranlib)
  if(tool STREQUAL "c++")
    set(target " -target $ENV{EMBEDLM_TARGET}")
  else()
    set(target "")
  endif()
  if(NOT EXISTS "${tools}/${tool}")
    file(WRITE "${tools}/${tool}" "#!/bin/sh\nexec '$ENV{EMBEDLM_ZIG}' ${tool}${target} \"$@\"\n")
    execute_process(COMMAND chmod +x "${tools}/${tool}")
  endif()
endforeach()
set(CMAKE_CXX_COMPILER "${tools}/c++")
set(CMAKE_AR "${tools}/ar")
set(CMAKE_RANLIB "${tools}/ranlib")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
