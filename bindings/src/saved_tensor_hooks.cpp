#include "src/saved_tensor_hooks.h"

#include <smp/error.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <new>
#include <utility>

// Types of the C API: these objects are made and called for every tensor that autograd saves.
namespace smp {
namespace {

namespace py = pybind11;
using checkpointing::Region;

/// What autograd keeps in place of a tensor.
struct Holder {
  PyObject ob_base;
  std::shared_ptr<Region> region;
  std::uint32_t number;
};

struct PackHook {
  PyObject ob_base;
  std::shared_ptr<Region> region;
};

struct RecordHook {
  PyObject ob_base;
  std::weak_ptr<Region> region;
  std::int64_t pass;
};

PyTypeObject* holder_type = nullptr;
PyTypeObject* pack_type = nullptr;
PyTypeObject* record_type = nullptr;
PyObject* stop_type = nullptr;
PyObject* unpack_function = nullptr;

/// Sets the Python error for the C++ exception that is being handled.
PyObject* raise_current() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (python_error& error) {
    error.restore();
  } catch (const UsageError& error) {
    PyErr_SetString(py::module_::import("smp.exceptions").attr("SMPUsageError").ptr(), error.what());
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void forget_number(Holder& holder) { holder.region->drop(holder.number); }
template <typename Object>
void forget_number(Object& /*hook*/) {}

template <typename Object>
void delete_object(PyObject* self) {
  using Pointer = decltype(Object::region);
  auto* type = Py_TYPE(self);
  auto* object = reinterpret_cast<Object*>(self);
  forget_number(*object);
  object->region.~Pointer();
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Object>
PyTypeObject* make_type(const char* name, ternaryfunc call) {
  PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&delete_object<Object>)},
                         {call != nullptr ? Py_tp_call : 0, reinterpret_cast<void*>(call)},
                         {0, nullptr}};
  PyType_Spec spec{name, sizeof(Object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  auto* type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

template <typename Object>
Object* allocate(PyTypeObject* type) {
  auto* object = type->tp_alloc(type, 0);
  if (object == nullptr) {
    throw py::error_already_set();
  }
  return reinterpret_cast<Object*>(object);
}

PyObject* call_pack(PyObject* self, PyObject* args, PyObject* /*kwargs*/) {
  try {
    const auto& region = reinterpret_cast<PackHook*>(self)->region;
    const auto number = region->save(THPVariable_Unpack(PyTuple_GET_ITEM(args, 0)));
    auto* holder = allocate<Holder>(holder_type);
    new (&holder->region) std::shared_ptr<Region>(region);
    holder->number = number;
    return reinterpret_cast<PyObject*>(holder);
  } catch (...) {
    return raise_current();
  }
}

PyObject* call_record(PyObject* self, PyObject* args, PyObject* /*kwargs*/) {
  try {
    // An operator that saves its result would otherwise keep the graph of which it is itself a part.
    auto x = THPVariable_Unpack(PyTuple_GET_ITEM(args, 0)).tensor_data();
    auto* hook = reinterpret_cast<RecordHook*>(self);
    const auto region = hook->region.lock();
    if (region && region->record(hook->pass, x) && !region->verifies()) {
      PyErr_SetNone(stop_type);
      return nullptr;
    }
    return THPVariable_Wrap(std::move(x));
  } catch (...) {
    return raise_current();
  }
}

PyObject* unpack(PyObject* /*self*/, PyObject* saved) {
  if (Py_TYPE(saved) != holder_type) {  // of a recompute: the tensor itself
    Py_INCREF(saved);
    return saved;
  }
  try {
    const auto* holder = reinterpret_cast<Holder*>(saved);
    const auto region = holder->region;
    at::Tensor x;
    {
      const py::gil_scoped_release without_gil;
      x = region->load(holder->number);
    }
    return THPVariable_Wrap(std::move(x));
  } catch (...) {
    return raise_current();
  }
}

PyMethodDef unpack_definition{"unpack", unpack, METH_O, nullptr};

}  // namespace

py::object pack_hook(std::shared_ptr<Region> region) {
  auto* hook = allocate<PackHook>(pack_type);
  new (&hook->region) std::shared_ptr<Region>(std::move(region));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(hook));
}

py::object record_hook(std::weak_ptr<Region> region, std::int64_t pass) {
  auto* hook = allocate<RecordHook>(record_type);
  new (&hook->region) std::weak_ptr<Region>(std::move(region));
  hook->pass = pass;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(hook));
}

py::object unpack_hook() { return py::reinterpret_borrow<py::object>(unpack_function); }

py::handle stop_recompute_type() { return stop_type; }

void ready_hook_types(py::module_& module) {
  holder_type = make_type<Holder>("smp._C.SavedNumber", nullptr);
  pack_type = make_type<PackHook>("smp._C.PackHook", &call_pack);
  record_type = make_type<RecordHook>("smp._C.RecordHook", &call_record);
  // Not an Exception, so that the code of models does not swallow it.
  stop_type = PyErr_NewException("smp._C.StopRecompute", PyExc_BaseException, nullptr);
  unpack_function = PyCFunction_New(&unpack_definition, nullptr);
  if (stop_type == nullptr || unpack_function == nullptr) {
    throw py::error_already_set();
  }
  module.attr("StopRecompute") = py::handle(stop_type);
}

}  // namespace smp
