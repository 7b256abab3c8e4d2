# Language level, optimisation, warnings, sanitizers and the compiler cache: the one place for compiler options.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()
# LibTorch headers make full debug information double the compile time; -g1 keeps line numbers in backtraces.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

# What costs time is LibTorch's headers, so the build of the package (but not the presets) compiles several sources at
# once, each part in a few units. Names in anonymous namespaces must differ within a part.
set(CMAKE_UNITY_BUILD_BATCH_SIZE 6)

find_program(SMP_CCACHE ccache)
mark_as_advanced(SMP_CCACHE)
if(SMP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Relative paths and no hashed directory let build folders of one tree share cache entries.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND}" -E env CCACHE_NOHASHDIR=1 "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" "${SMP_CCACHE}")
endif()

add_library(smp_options INTERFACE)
target_compile_options(smp_options INTERFACE -Wall -Wextra -Wno-unused-parameter)
if(SMP_WARNINGS_AS_ERRORS)
  target_compile_options(smp_options INTERFACE -Werror)
endif()
if(SMP_SANITIZER)
  target_compile_options(smp_options INTERFACE -fsanitize=${SMP_SANITIZER} -fno-omit-frame-pointer)
  target_link_options(smp_options INTERFACE -fsanitize=${SMP_SANITIZER})
endif()
