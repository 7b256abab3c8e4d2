# LibTorch (from the Python wheel), fmt (the copy that LibTorch bundles), MPI (optional).

if(NOT DEFINED Python_EXECUTABLE AND EXISTS "${CMAKE_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${CMAKE_SOURCE_DIR}/.venv/bin/python" CACHE FILEPATH "Python with torch installed")
endif()
if(SMP_BUILD_PYTHON)
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
else()
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
endif()

if(NOT SMP_TORCH_DIR)
  # find_spec does not import torch: a few milliseconds instead of seconds.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE smp_torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT smp_torch_dir)
    message(FATAL_ERROR "PyTorch is not installed for ${Python_EXECUTABLE}: run `make setup`, "
                        "or pass -DPython_EXECUTABLE=<a Python that has torch>.")
  endif()
  set(SMP_TORCH_DIR "${smp_torch_dir}" CACHE PATH "Folder of the installed torch package")
endif()
list(PREPEND CMAKE_PREFIX_PATH "${SMP_TORCH_DIR}/share/cmake")
# TorchConfig warns of libraries that the wheel does not ship and nothing here uses; its errors still show.
set(CMAKE_MESSAGE_LOG_LEVEL ERROR)
find_package(Torch REQUIRED)
unset(CMAKE_MESSAGE_LOG_LEVEL)

# SYSTEM: warnings in LibTorch's headers are not ours to mend. The folders also hold pybind11 and fmt.
add_library(smp_torch INTERFACE)
target_include_directories(smp_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
target_link_libraries(smp_torch INTERFACE ${TORCH_LIBRARIES})
# Header-only: the bundled headers have no library of their version beside them.
target_compile_definitions(smp_torch INTERFACE FMT_HEADER_ONLY=1)

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
