// Entry point of the extension smp._C. Each folder of the library registers its own names.

#include <pybind11/pybind11.h>

#include "register_all.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ core of the smp package.";
  register_all(module);
}
