#include "src/module_snapshot.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string_view>

namespace smp {

namespace py = pybind11;

namespace {

bool has_graph(PyObject* value) {
  return THPVariable_Check(value) && THPVariable_Unpack(value).requires_grad() && !THPVariable_Unpack(value).is_leaf();
}

py::object without_graph(PyObject* value) {
  auto x = THPVariable_Unpack(value).tensor_data();
  x.set_requires_grad(true);
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(x)));
}

/// What this library keeps at a module, and learns in a call, is not part of the module's state.
bool is_ours(const py::handle& key) {
  return PyUnicode_Check(key.ptr()) && py::cast<std::string_view>(key).starts_with("_smp_");
}

}  // namespace

void ModuleSnapshot::put_back() const {
  for (const auto& [dict, entries] : dicts_) {
    for (const auto& [key, value] : entries) {
      if (PyDict_GetItemWithError(dict.ptr(), key.ptr()) != value.ptr() &&
          PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) != 0) {
        throw py::error_already_set();
      }
    }
    if (dict.size() == entries.size()) {
      continue;
    }
    py::set known;
    for (const auto& entry : entries) {
      known.add(entry.first);
    }
    for (const auto& key : py::list(dict.attr("keys")())) {
      if (!known.contains(key) && !is_ours(key)) {
        dict.attr("pop")(key);
      }
    }
  }
}

bool ModuleSnapshot::is_now() const {
  for (const auto& [dict, entries] : dicts_) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    std::size_t i = 0;
    for (; PyDict_Next(dict.ptr(), &position, &key, &value) != 0; ++i) {
      if (i >= entries.size() || entries[i].first.ptr() != key || entries[i].second.ptr() != value) {
        return false;
      }
    }
    if (i != entries.size()) {
      return false;
    }
  }
  return true;
}

int ModuleSnapshot::traverse(visitproc visit, void* arg) const {
  for (const auto& [dict, entries] : dicts_) {
    Py_VISIT(dict.ptr());
    for (const auto& [key, value] : entries) {
      Py_VISIT(value.ptr());
    }
  }
  return 0;
}

int ModuleWatch::traverse(visitproc visit, void* arg) const {
  for (const auto& dict : dicts_) {
    Py_VISIT(dict.ptr());
  }
  // What others hold too is theirs to tell of.
  return last_ && last_.use_count() == 1 ? last_->traverse(visit, arg) : 0;
}

void ModuleWatch::clear() {
  dicts_.clear();
  last_.reset();
}

std::vector<ModuleSnapshot::Dict> ModuleWatch::read() const {
  std::vector<ModuleSnapshot::Dict> dicts;
  dicts.reserve(dicts_.size());
  for (const auto& dict : dicts_) {
    dicts.push_back({dict, {}});
    auto& entries = dicts.back().entries;
    entries.reserve(dict.size());
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict.ptr(), &position, &key, &value) != 0) {
      entries.emplace_back(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value));
    }
  }
  return dicts;
}

std::shared_ptr<ModuleSnapshot> ModuleWatch::at_entry() {
  if (last_ && last_->is_now()) {
    return last_;
  }
  auto dicts = read();
  bool has_graphs = false;
  for (auto& dict : dicts) {
    for (auto& [key, value] : dict.entries) {
      if (has_graph(value.ptr())) {
        has_graphs = true;
        value = without_graph(value.ptr());
      }
    }
  }
  auto snapshot = std::make_shared<ModuleSnapshot>(std::move(dicts));
  last_ = has_graphs ? nullptr : snapshot;
  return snapshot;
}

bool ModuleWatch::changed() {
  if (last_ && last_->is_now()) {
    return false;
  }
  last_ = now();
  return true;
}

std::shared_ptr<ModuleSnapshot> ModuleWatch::now() const { return std::make_shared<ModuleSnapshot>(read()); }

}  // namespace smp
