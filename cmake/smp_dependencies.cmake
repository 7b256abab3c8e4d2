# LibTorch (from the installed torch package), fmt (the copy that LibTorch bundles), MPI (optional).

if(NOT DEFINED Python_EXECUTABLE AND EXISTS "${CMAKE_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${CMAKE_SOURCE_DIR}/.venv/bin/python" CACHE FILEPATH "Python with torch installed")
endif()
if(SMP_BUILD_PYTHON)
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
else()
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
endif()

# Asked whenever CMake runs, not kept in its cache: another torch may have come into the same environment. Not find_package(Torch): that of a build for
# CUDA wants a CUDA toolkit, of which nothing here is used; one binary serves all builds of a version.
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/describe_torch.py"
  OUTPUT_VARIABLE smp_torch ERROR_VARIABLE smp_torch_errors RESULT_VARIABLE smp_torch_result OUTPUT_STRIP_TRAILING_WHITESPACE)
if(smp_torch_result)
  message(FATAL_ERROR "PyTorch can't be imported by ${Python_EXECUTABLE}: install it there first (and build with `pip install "
                      "--no-build-isolation`), run `make setup`, or pass -DPython_EXECUTABLE=<a Python that has torch>.\n"
                      "${smp_torch_errors}")
endif()
list(GET smp_torch 0 SMP_TORCH_VERSION)
list(GET smp_torch 1 SMP_TORCH_CXX11_ABI)
list(GET smp_torch 2 SMP_TORCH_LIBRARIES)
list(SUBLIST smp_torch 3 -1 smp_torch_include_dirs)
if(SMP_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "PyTorch ${SMP_TORCH_VERSION} is installed: 2.11 or newer is needed")
endif()

# By path, and nothing else: what a build for CUDA adds lies in libraries that these load, or don't.
function(smp_torch_library variable name)
  find_library(path ${name} PATHS "${SMP_TORCH_LIBRARIES}" NO_DEFAULT_PATH NO_CACHE REQUIRED)
  set(${variable} "${path}" PARENT_SCOPE)
endfunction()
smp_torch_library(smp_torch_cpu_library torch_cpu)
smp_torch_library(smp_c10_library c10)
if(SMP_BUILD_PYTHON)
  smp_torch_library(SMP_TORCH_PYTHON_LIBRARY torch_python)
endif()

# SYSTEM: warnings in LibTorch's headers are not ours to mend. The folders also hold pybind11 and fmt.
add_library(smp_torch INTERFACE)
target_include_directories(smp_torch SYSTEM INTERFACE ${smp_torch_include_dirs})
# The version is there so that another one in the same place compiles everything anew: headers from a wheel keep old dates.
target_compile_definitions(smp_torch INTERFACE
  _GLIBCXX_USE_CXX11_ABI=${SMP_TORCH_CXX11_ABI} "SMP_TORCH_VERSION=\"${SMP_TORCH_VERSION}\"")
target_link_libraries(smp_torch INTERFACE "${smp_torch_cpu_library}" "${smp_c10_library}")

set(SMP_HAVE_MPI OFF)
if(SMP_WITH_MPI)
  # The C binding is enough, and spares libmpi_cxx.
  find_package(MPI COMPONENTS C)
  if(MPI_C_FOUND)
    set(SMP_HAVE_MPI ON)
    add_library(smp_mpi INTERFACE)
    target_link_libraries(smp_mpi INTERFACE MPI::MPI_C)
    # Without these the C++ bindings in mpi.h leave undefined symbols in the library.
    target_compile_definitions(smp_mpi INTERFACE OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
  else()
    message(STATUS "MPI not found: building without the MPI transport")
  endif()
endif()
