// smp._C.Topology: where a rank stands. Groups are named as in the Python API: world, mp, dp, pp, tp, rdp.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <smp/error.h>
#include <smp/topology.h>

#include <array>
#include <string>
#include <string_view>
#include <utility>

namespace py = pybind11;

namespace {

constexpr std::array<std::pair<std::string_view, smp::GroupKind>, 6> kGroups{{
    {"world", smp::GroupKind::kWorld},
    {"mp", smp::GroupKind::kModel},
    {"dp", smp::GroupKind::kData},
    {"pp", smp::GroupKind::kPipeline},
    {"tp", smp::GroupKind::kTensor},
    {"rdp", smp::GroupKind::kReducedData},
}};

smp::GroupKind group_kind(const std::string& name) {
  for (const auto& [group_name, kind] : kGroups) {
    if (group_name == name) {
      return kind;
    }
  }
  smp::throw_usage("the group is '{}': it must be one of world, mp, dp, pp, tp, rdp", name);
}

}  // namespace

void register_topology(py::module_& module) {
  using smp::GroupKind;
  using smp::Topology;
  py::class_<Topology>(module, "Topology", "World ranks arranged by pipeline, tensor and reduced data degree.")
      .def(py::init<int, int, int, int, std::string>(), py::arg("rank"), py::arg("size"), py::arg("pipeline_degree"),
           py::arg("tensor_degree"), py::arg("placement"))
      .def_property_readonly("rank", [](const Topology& topology) { return topology.rank(); })
      .def_property_readonly("size", [](const Topology& topology) { return topology.size(); })
      .def_property_readonly("pp_rank", &Topology::pp_rank)
      .def_property_readonly("pp_size", &Topology::pp_size)
      .def_property_readonly("pp_group", [](const Topology& topology) { return topology.group(GroupKind::kPipeline); })
      .def_property_readonly("tp_rank", &Topology::tp_rank)
      .def_property_readonly("tp_size", &Topology::tp_size)
      .def_property_readonly("tp_group", [](const Topology& topology) { return topology.group(GroupKind::kTensor); })
      .def_property_readonly("rdp_rank", &Topology::rdp_rank)
      .def_property_readonly("rdp_size", &Topology::rdp_size)
      .def_property_readonly("rdp_group",
                             [](const Topology& topology) { return topology.group(GroupKind::kReducedData); })
      .def_property_readonly("dp_rank", &Topology::dp_rank)
      .def_property_readonly("dp_size", &Topology::dp_size)
      .def_property_readonly("dp_group", [](const Topology& topology) { return topology.group(GroupKind::kData); })
      .def_property_readonly("mp_rank", &Topology::mp_rank)
      .def_property_readonly("mp_size", &Topology::mp_size)
      .def_property_readonly("mp_group", [](const Topology& topology) { return topology.group(GroupKind::kModel); })
      .def(
          "group", [](const Topology& topology, const std::string& name) { return topology.group(group_kind(name)); },
          py::arg("name"), "World ranks of this rank's group of that name, ascending.")
      .def(
          "group_rank",
          [](const Topology& topology, const std::string& name) { return topology.rank(group_kind(name)); },
          py::arg("name"))
      .def(
          "group_size",
          [](const Topology& topology, const std::string& name) { return topology.size(group_kind(name)); },
          py::arg("name"));
}
