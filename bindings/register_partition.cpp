// Module trees and partitioners. Modules are numbers here, in the order of ModuleTree.add.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <smp/partition/manual.h>
#include <smp/partition/tree.h>
#include <smp/partition/tree_partitioner.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

void register_partition(py::module_& module) {
  using smp::partition::ModuleTree;
  py::class_<ModuleTree>(module, "ModuleTree", "A model as a tree of modules with the bytes of their parameters.")
      .def(py::init<>())
      .def(
          "add",
          [](ModuleTree& tree, std::string name, int parent,
             const std::vector<std::pair<std::uint64_t, std::int64_t>>& parameters) {
            std::vector<smp::partition::Parameter> converted;
            converted.reserve(parameters.size());
            for (const auto& [id, bytes] : parameters) {
              converted.push_back({id, bytes});
            }
            return tree.add(std::move(name), parent, converted);
          },
          py::arg("name"), py::arg("parent"), py::arg("parameters"),
          "Adds a module after its parent (-1 for the root), with (id, bytes) of each parameter that it owns.");
  module.def(
      "partition_tree",
      [](const ModuleTree& tree, int partitions, double memory_weight) {
        return smp::partition::partition_tree(tree, partitions, memory_weight).home;
      },
      py::arg("tree"), py::arg("partitions"), py::arg("memory_weight"), py::call_guard<py::gil_scoped_release>(),
      "The partition of each module, balanced by cost.");
  module.def("place_by_hand", &smp::partition::place_by_hand, py::arg("tree"), py::arg("marks"),
             py::arg("default_partition"), py::arg("partitions"), py::call_guard<py::gil_scoped_release>(),
             "The partition of each module by marks (-1 where there is none), inherited from parents.");
}
