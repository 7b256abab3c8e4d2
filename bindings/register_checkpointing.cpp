// smp._C.Region: checkpointed calls, and the saved-tensor hooks of them.

#include <ATen/SavedTensorHooks.h>
#include <pybind11/stl.h>
#include <smp/checkpointing/region.h>
#include <smp/error.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "src/module_snapshot.h"
#include "src/saved_tensor_hooks.h"

namespace py = pybind11;

namespace {

using smp::checkpointing::Region;
using smp::checkpointing::RegionReport;
using smp::checkpointing::ReplayState;

thread_local int tls_regions = 0;     // whose forward this thread is in
thread_local int tls_recomputes = 0;  // that this thread is in

std::vector<at::Tensor> unwrap_all(const py::handle& tensors) {
  std::vector<at::Tensor> unwrapped;
  for (const auto& item : py::reinterpret_borrow<py::sequence>(tensors)) {
    unwrapped.push_back(THPVariable_Unpack(item.ptr()));
  }
  return unwrapped;
}

/// Saved-tensor hooks in force for a scope of this thread.
class HooksScope {
 public:
  explicit HooksScope(const py::object& pack) {
    at::SavedTensorDefaultHooks::lazy_initialize();
    at::SavedTensorDefaultHooks::push_hooks(c10::SafePyObject(pack.inc_ref().ptr(), getPyInterpreter()),
                                            c10::SafePyObject(smp::unpack_hook().release().ptr(), getPyInterpreter()));
  }
  ~HooksScope() { static_cast<void>(at::SavedTensorDefaultHooks::pop_hooks()); }
  HooksScope(const HooksScope&) = delete;
  HooksScope& operator=(const HooksScope&) = delete;
};

/// Runs `replay(tensors) -> list of output tensors` of Python as a region's function.
class PythonFunction {
 public:
  explicit PythonFunction(py::object replay) : replay_(new py::object(std::move(replay)), &PythonFunction::forget) {}

  void operator()(Region& region, std::int64_t pass, std::vector<at::Tensor> inputs) const {
    const py::gil_scoped_acquire gil;
    py::list list(inputs.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      list[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(inputs[i])));
    }
    inputs.clear();
    ++tls_recomputes;
    try {
      py::object outputs;
      {
        const HooksScope hooks(smp::record_hook(region.weak_from_this(), pass));
        outputs = (*replay_)(std::move(list));
      }
      if (region.verifies()) {
        region.check_outputs(unwrap_all(outputs));
      }
    } catch (py::error_already_set& error) {
      --tls_recomputes;
      if (!error.matches(smp::stop_recompute_type())) {
        throw;
      }
      return;
    } catch (...) {
      --tls_recomputes;
      throw;
    }
    --tls_recomputes;
  }

 private:
  static void forget(py::object* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  }
  std::shared_ptr<py::object> replay_;
};

/// The forward of a region as a context manager.
class RegionForward {
 public:
  RegionForward(std::shared_ptr<RegionReport> report, bool preserve_random, const py::sequence& inputs,
                py::object replay, bool watch_random)
      : entry_(watch_random ? std::optional<smp::ReplayableRandom>(std::in_place) : std::nullopt),
        region_(std::make_shared<Region>(std::move(report), ReplayState(preserve_random),
                                         smp::checkpointing::device_store()->save(unwrap_all(inputs)),
                                         PythonFunction(std::move(replay)))) {}
  void enter() {
    hooks_ = std::make_unique<HooksScope>(smp::pack_hook(region_));
    ++tls_regions;
  }
  void exit() {
    --tls_regions;
    hooks_.reset();
  }
  [[nodiscard]] bool has_drawn() const { return entry_ && entry_->has_moved(); }
  void verify(const py::sequence& outputs) { region_->verify(unwrap_all(outputs)); }
  void end(const py::sequence& outside) {
    region_->end_forward(unwrap_all(outside));
    region_.reset();
  }

 private:
  std::optional<smp::ReplayableRandom> entry_;
  std::shared_ptr<Region> region_;
  std::unique_ptr<HooksScope> hooks_;
};

void register_reports(py::module_& module) {
  py::class_<RegionReport, std::shared_ptr<RegionReport>>(module, "RegionReport",
                                                          "Standing figures of the regions of one module.")
      .def(py::init([](std::string name) {
             auto report = std::make_shared<RegionReport>();
             report->name = std::move(name);
             return report;
           }),
           py::arg("name"))
      .def_readonly("name", &RegionReport::name)
      .def_property_readonly("calls", [](const RegionReport& report) { return report.calls.load(); })
      .def_property_readonly("recomputes", [](const RegionReport& report) { return report.recomputes.load(); })
      .def_property_readonly("saved_bytes", [](const RegionReport& report) { return report.saved_bytes.load(); })
      .def_property_readonly("input_bytes", [](const RegionReport& report) { return report.input_bytes.load(); })
      .def_property_readonly("recompute_s", [](const RegionReport& report) {
        return static_cast<double>(report.recompute_ns.load()) * 1e-9;
      });
}

}  // namespace

void register_checkpointing(py::module_& module) {
  smp::ready_hook_types(module);
  register_reports(module);
  py::class_<RegionForward>(module, "RegionForward", "The forward of one checkpointed call.")
      .def(py::init<std::shared_ptr<RegionReport>, bool, const py::sequence&, py::object, bool>(), py::arg("report"),
           py::arg("preserve_random"), py::arg("inputs"), py::arg("replay"), py::arg("watch_random"))
      .def("__enter__", &RegionForward::enter)
      .def("__exit__", [](RegionForward& forward, const py::args&) { forward.exit(); })
      .def_property_readonly("has_drawn", &RegionForward::has_drawn)
      .def("verify", &RegionForward::verify, py::arg("outputs"))
      .def("end", &RegionForward::end, py::arg("outside"));
  py::class_<smp::ModuleSnapshot, std::shared_ptr<smp::ModuleSnapshot>>(module, "ModuleSnapshot",
                                                                        "What some dicts of modules held.")
      .def("put_back", &smp::ModuleSnapshot::put_back);
  // The garbage collector sees through a watch: a module holds the one that holds its attributes.
  const auto collected = py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    auto* type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      if (!reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder().holder_constructed()) {
        return 0;
      }
      return py::cast<smp::ModuleWatch&>(py::handle(self)).traverse(visit, arg);
    };
    type->tp_clear = [](PyObject* self) {
      py::cast<smp::ModuleWatch&>(py::handle(self)).clear();
      return 0;
    };
  });
  py::class_<smp::ModuleWatch>(module, "ModuleWatch", "Takes snapshots of some dicts of modules.", collected)
      .def(py::init<std::vector<py::dict>>(), py::arg("dicts"))
      .def("at_entry", &smp::ModuleWatch::at_entry,
           "Without the graphs of tensors; the last one where nothing changed.")
      .def("changed", &smp::ModuleWatch::changed)
      .def("now", &smp::ModuleWatch::now);
  module.def("count_regions", &Region::count,
             "How many calls of regions wait for backward, or hold on to their graph.");
  module.def(
      "in_region", [] { return tls_regions > 0; }, "Is this thread in the forward of a region?");
  module.def(
      "is_recomputing", [] { return tls_recomputes > 0; }, "Does this thread run a region again?");
  module.def("register_generator", &smp::register_generator, py::arg("generator"));
  module.def(
      "overwrite", [](const at::Tensor& x, const at::Tensor& value) { x.variable_data().copy_(value); },
      "Gives a tensor other data, behind autograd's back.");
}
