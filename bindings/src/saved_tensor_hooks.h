// The Python objects that autograd's saved-tensor hooks of a region are made of. All functions need the GIL.
#pragma once

#include <smp/checkpointing/region.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>

namespace smp {

/// pack in forward: a tensor becomes a number of the region.
pybind11::object pack_hook(std::shared_ptr<checkpointing::Region> region);
/// pack in a recompute: the region keeps the tensor, and an exception leaves the function once nothing more is needed.
pybind11::object record_hook(std::weak_ptr<checkpointing::Region> region, std::int64_t pass);
/// unpack of both.
pybind11::object unpack_hook();

/// The exception that leaves a recompute.
pybind11::handle stop_recompute_type();

/// Makes the types; once.
void ready_hook_types(pybind11::module_& module);

}  // namespace smp
