// Entry point of the extension smp._C. Each folder of the library registers its own names.

#include <pybind11/pybind11.h>

#include "register_all.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ core of the smp package.";
  // The package compares it with the torch it imports: LibTorch has no stable C++ ABI between releases.
  module.attr("built_with_torch") = SMP_TORCH_VERSION;
  register_all(module);
}
