// smp._C.Engine, and the host that runs Python modules for it.

#include <c10/core/StorageImpl.h>
#include <smp/error.h>
#include <smp/pipeline/engine.h>
#include <smp/pipeline/nodes.h>
#include <smp/pipeline/policy.h>
#include <smp/random.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using smp::pipeline::CallOutcome;
using smp::pipeline::Engine;
using smp::pipeline::EngineOptions;
using smp::pipeline::Failure;
using smp::pipeline::Host;

/// Keeps the Python thread state of an engine's thread: making one anew for each call costs more, and thread-locals of
/// modules would be lost.
class ThreadState {
 public:
  ThreadState() : gil_(PyGILState_Ensure()), thread_(PyEval_SaveThread()) {}
  ~ThreadState() {
    PyEval_RestoreThread(thread_);
    PyGILState_Release(gil_);
  }
  ThreadState(const ThreadState&) = delete;
  ThreadState& operator=(const ThreadState&) = delete;

 private:
  PyGILState_STATE gil_;
  PyThreadState* thread_;
};

py::list wrap(const std::vector<at::Tensor>& tensors) {
  py::list list(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    list[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors[i]));
  }
  return list;
}

std::vector<at::Tensor> unwrap(const py::handle& list) {
  std::vector<at::Tensor> tensors;
  for (const auto& item : py::reinterpret_borrow<py::sequence>(list)) {
    tensors.push_back(THPVariable_Unpack(item.ptr()));
  }
  return tensors;
}

/// The exception with the traceback that Python keeps beside it until somebody catches it.
py::object with_traceback(const py::error_already_set& error) {
  if (error.trace()) {
    PyException_SetTraceback(error.value().ptr(), error.trace().ptr());
  }
  return error.value();
}

/// Calls `host.run(module, tree, tensors, training) -> (tree, tensors)`, `host.describe(exception) -> (message,
/// payload)` and `host.aborted(failure) -> exception` of a Python object.
class PythonHost final : public Host {
 public:
  explicit PythonHost(py::object host) : host_(std::move(host)) {}
  ~PythonHost() override {
    const py::gil_scoped_acquire gil;
    host_ = py::object();
  }

  Outcome run(std::int32_t module, const std::string& tree, std::vector<at::Tensor> inputs,
              const std::string& training) override {
    static thread_local const ThreadState thread_state;
    const py::gil_scoped_acquire gil;
    auto list = wrap(inputs);
    inputs.clear();
    const auto result = py::reinterpret_borrow<py::tuple>(
        host_.attr("run")(module, py::bytes(tree), std::move(list), py::bytes(training)));
    return {result[0].cast<std::string>(), unwrap(result[1])};
  }

  void describe(const std::exception_ptr& error, Failure& failure) override {
    const py::gil_scoped_acquire gil;
    py::object exception;
    try {
      std::rethrow_exception(error);
    } catch (py::error_already_set& e) {
      exception = with_traceback(e);
    } catch (python_error& e) {
      e.restore();
      exception = with_traceback(py::error_already_set());
    } catch (const smp::UsageError& e) {
      exception = py::module_::import("smp.exceptions").attr("SMPUsageError")(e.what());
    } catch (const smp::Error& e) {
      exception = py::module_::import("smp.exceptions").attr("SMPFailureError")(e.what());
    } catch (const c10::Error& e) {
      exception = py::module_::import("builtins").attr("RuntimeError")(e.what_without_backtrace());
    } catch (const std::exception& e) {
      exception = py::module_::import("builtins").attr("RuntimeError")(e.what());
    }
    const auto described = py::reinterpret_borrow<py::tuple>(host_.attr("describe")(exception));
    failure.message = described[0].cast<std::string>();
    failure.payload = described[1].cast<std::string>();
  }

  void check_interrupt() override {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }

  void throw_aborted(const Failure& failure) override {
    const py::gil_scoped_acquire gil;
    const py::object exception = host_.attr("aborted")(failure);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    throw py::error_already_set();
  }

  void* leave_interpreter() override { return PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr; }
  void enter_interpreter(void* state) override {
    if (state != nullptr) {
      PyEval_RestoreThread(static_cast<PyThreadState*>(state));
    }
  }

 private:
  py::object host_;
};

EngineOptions make_options(const std::string& pipeline, int active_microbatches, double stall_timeout_s,
                           bool rng_by_module, std::vector<int> peers, const py::list& modules,
                           const py::list& parameters, std::vector<int> shared, std::uint32_t generation) {
  EngineOptions options;
  options.shared = std::move(shared);
  options.stall_timeout_s = stall_timeout_s;
  options.rng_by_module = rng_by_module;
  options.policy = smp::pipeline::policy_named(pipeline);
  options.active_microbatches = active_microbatches;
  options.peers = std::move(peers);
  options.generation = generation;
  for (const auto& item : modules) {
    const auto m = py::reinterpret_borrow<py::tuple>(item);
    options.modules.push_back({m[0].cast<std::string>(), m[1].cast<int>(), m[2].cast<bool>(), m[3].cast<bool>(),
                               m[4].cast<bool>(), m[5].cast<std::vector<int>>()});
  }
  for (const auto& item : parameters) {
    const auto p = py::reinterpret_borrow<py::tuple>(item);
    options.parameters.push_back({p[0].cast<std::string>(), THPVariable_Unpack(p[1].ptr()), p[2].cast<int>()});
  }
  return options;
}

std::shared_ptr<Engine> make_engine(std::shared_ptr<smp::Transport> transport, py::object host,
                                    const std::string& pipeline, int active_microbatches, double stall_timeout_s,
                                    bool rng_by_module, std::vector<int> peers, const py::list& modules,
                                    const py::list& parameters, std::vector<int> shared, std::uint32_t generation) {
  auto options = make_options(pipeline, active_microbatches, stall_timeout_s, rng_by_module, std::move(peers), modules,
                              parameters, std::move(shared), generation);
  auto python_host = std::make_shared<PythonHost>(std::move(host));
  const py::gil_scoped_release release;
  auto* engine = new Engine(std::move(transport), std::move(python_host), std::move(options));
  return {engine, [](Engine* dying) {  // closing waits for threads that may need the GIL
            if (PyGILState_Check() != 0) {
              const py::gil_scoped_release without_gil;
              delete dying;
            } else {
              delete dying;
            }
          }};
}

/// Operators on such a tensor are looked at above autograd, as those on a remote tensor are: in a step it is gathered.
struct DispatchKeysOf : c10::TensorImpl {
  static void add(c10::TensorImpl& tensor, c10::DispatchKey key) {
    constexpr auto kKeys = &DispatchKeysOf::key_set_;
    tensor.*kKeys = (tensor.*kKeys).add(key);
  }
};

/// Frees the memory of a tensor that lives on another rank. Any later read of its data raises `message`. The storage
/// keeps its size, so that views of the tensor can be made, and raise with the same message when they are read.
void vacate(const at::Tensor& tensor, const std::string& message) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
                                                       at::DataPtr(nullptr, tensor.device()), nullptr, false);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  storage->set_throw_on_mutable_data_ptr();
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(std::move(storage)));
  DispatchKeysOf::add(*tensor.unsafeGetTensorImpl(), c10::DispatchKey::DeferredInit);
}

/// False after vacate().
bool holds_memory(const at::Tensor& tensor) {
  return tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
}

void register_failure(py::module_& module) {
  py::class_<Failure>(module, "Failure", "What went wrong in a step, and where.")
      .def(py::init<>())
      .def_readwrite("step", &Failure::step)
      .def_readwrite("rank", &Failure::rank)
      .def_readwrite("microbatch", &Failure::microbatch)
      .def_readwrite("where", &Failure::where)
      .def_readwrite("message", &Failure::message)
      .def_property(
          "payload", [](const Failure& failure) { return py::bytes(failure.payload); },
          [](Failure& failure, const py::bytes& payload) { failure.payload = payload; })
      .def("describe", &Failure::describe);
}

void register_engine(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine", "The interpreter of one rank.")
      .def(py::init(&make_engine), py::arg("transport"), py::arg("host"), py::arg("pipeline"),
           py::arg("active_microbatches"), py::arg("stall_timeout_s"), py::arg("rng_by_module"), py::arg("peers"),
           py::arg("modules"), py::arg("parameters"), py::arg("shared"), py::arg("generation"))
      .def_property_readonly("partition", &Engine::partition)
      .def_property_readonly("partitions", &Engine::partitions)
      .def("begin_step", &Engine::begin_step, without_gil)
      .def("begin_microbatch", &Engine::begin_microbatch, without_gil)
      .def("end_microbatch", &Engine::end_microbatch, without_gil)
      .def("leave_failed_step", &Engine::leave_failed_step, without_gil)
      .def("finish_microbatches", &Engine::finish_microbatches, without_gil)
      .def(
          "end_step", [](Engine& engine, const std::string& outputs) { engine.end_step(outputs); }, without_gil)
      .def("follow_step",
           [](Engine& engine, const std::string& name) {
             std::string outputs;
             {
               const py::gil_scoped_release release;
               outputs = engine.follow_step(name);
             }
             return py::bytes(outputs);
           })
      .def("abort", &Engine::abort, without_gil)
      .def_property_readonly("failure", &Engine::failure)
      .def_property_readonly("step", &Engine::step)
      .def("set_dynamic", &Engine::set_dynamic, py::arg("module"), py::arg("dynamic"))
      .def("close", &Engine::close, without_gil)
      .def("call",
           [](Engine& engine, std::int32_t target, const std::string& tree, const py::list& tensors,
              const std::string& training) {
             auto inputs = unwrap(tensors);
             CallOutcome outcome;
             {
               const py::gil_scoped_release release;
               outcome = engine.call(target, tree, inputs, training);
               inputs.clear();
             }
             return py::make_tuple(py::bytes(outcome.tree), wrap(outcome.outputs));
           })
      .def("fetch", &Engine::fetch, without_gil, "The data of a tensor, without autograd. Blocks.")
      .def("begin_fetch", &Engine::begin_fetch, without_gil, "Asks for the data of a tensor; does not block.")
      .def("end_fetch", &Engine::end_fetch, without_gil, "Waits for what begin_fetch asked for.")
      .def("watch_gradients", &Engine::watch_gradients, "To be called before each backward.")
      .def(
          "root",
          [](Engine& engine, const at::Tensor& x) {
            const py::gil_scoped_release release;
            return smp::pipeline::is_remote(x) || !x.requires_grad() ? x : engine.to_home(x, engine.partition(), false);
          },
          "A tensor whose backward is issued, though it lies on this rank.")
      .def(
          "seed",
          [](Engine& engine, const at::Tensor& x, const at::Tensor& gradient) {
            const py::gil_scoped_release release;
            return smp::pipeline::is_remote(x) ? engine.to_home(gradient, engine.home_of(x), false) : gradient;
          },
          "The gradient that backward starts with, where the tensor lies.")
      .def("counts",
           [](const Engine& engine) {
             const auto counts = engine.counts();
             py::dict result;
             result["executed"] = counts.executed;
             result["issued"] = counts.issued;
             result["moved_bytes"] = counts.moved_bytes;
             result["moved_values"] = counts.moved_values;
             result["waits"] = counts.waits;
             result["asked"] = counts.asked;
             result["gradient_contributions"] = counts.gradient_contributions;
             result["peak_microbatches"] = counts.peak_microbatches;
             return result;
           })
      .def("state", [](const Engine& engine) {
        const auto state = engine.state();
        py::dict result;
        result["values"] = state.values;
        result["calls"] = state.calls;
        result["value_bytes"] = state.value_bytes;
        result["queued"] = state.queued;
        result["frames"] = state.frames;
        result["pending_gradient_bytes"] = state.pending_gradient_bytes;
        return result;
      });
}

/// A microbatch with one partition, whose random numbers are those of the outermost frame of an engine.
class PlainMicrobatch {
 public:
  PlainMicrobatch(std::uint64_t step_key, std::uint64_t microbatch)
      : key_(smp::mix(step_key, microbatch)), before_(smp::RandomState::of_defaults()) {}
  void enter() {
    smp::seed_defaults(key_);
    stream_.emplace(at::Generator(), /*apart=*/true);
  }
  void exit() {
    stream_.reset();
    before_.restore();
  }

 private:
  std::uint64_t key_;
  smp::RandomState before_;
  std::optional<smp::StreamScope> stream_;
};

/// OpenLifts as a context manager.
class OpenLiftsContext {
 public:
  OpenLiftsContext(const py::sequence& roots, const py::sequence& wanted)
      : roots_(unwrap_all(roots)), wanted_(unwrap_all(wanted)) {}
  void enter() { open_ = std::make_unique<smp::pipeline::OpenLifts>(roots_, wanted_); }
  void exit() { open_.reset(); }

 private:
  static std::vector<at::Tensor> unwrap_all(const py::sequence& items) {
    std::vector<at::Tensor> tensors;
    for (const auto& item : items) {
      if (THPVariable_Check(item.ptr())) {  // else a GradientEdge
        tensors.push_back(THPVariable_Unpack(item.ptr()));
      }
    }
    return tensors;
  }

  std::vector<at::Tensor> roots_;
  std::vector<at::Tensor> wanted_;
  std::unique_ptr<smp::pipeline::OpenLifts> open_;
};

void register_random(py::module_& module) {
  module.def("seed_defaults", &smp::seed_defaults, py::arg("key"));
  py::class_<smp::RandomState>(module, "RandomState", "The states of the default generators now.")
      .def(py::init(&smp::RandomState::of_defaults))
      .def("restore", &smp::RandomState::restore);
  module.def("draw_key", &smp::draw_key, "The next 64 bits of this thread's stream of random numbers.");
  module.def(
      "own_stream",
      []() -> std::optional<at::Generator> {
        auto generator = smp::own_stream();
        return generator.defined() ? std::optional(std::move(generator)) : std::nullopt;
      },
      "The generator that is this thread's stream of random numbers; None where that is the default one.");
  module.def("enter_module", &smp::enter_module, "Gives a module a stream of its own, seeded by the caller's.");
  module.def("leave_module", &smp::leave_module, "Goes on with the stream of the caller.");
  py::class_<PlainMicrobatch>(module, "PlainMicrobatch", "Random numbers of a microbatch with one partition.")
      .def(py::init<std::uint64_t, std::uint64_t>(), py::arg("step_key"), py::arg("microbatch"))
      .def("__enter__", &PlainMicrobatch::enter)
      .def("__exit__", [](PlainMicrobatch& microbatch, const py::args&) { microbatch.exit(); });
}

}  // namespace

void register_pipeline(py::module_& module) {
  register_failure(module);
  register_engine(module);
  py::class_<OpenLiftsContext>(module, "OpenLifts", "In an autograd.grad, graphs go on through lifted tensors.")
      .def(py::init<py::sequence, py::sequence>(), py::arg("roots"), py::arg("wanted"))
      .def("__enter__", &OpenLiftsContext::enter)
      .def("__exit__", [](OpenLiftsContext& context, const py::args&) { context.exit(); });
  register_random(module);
  module.def(
      "is_elsewhere", [](const at::Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::DeferredInit); },
      py::arg("tensor"), "A remote tensor, or a parameter that lives on another rank.");
  module.def("vacate", &vacate, py::arg("tensor"), py::arg("message"));
  module.def("holds_memory", &holds_memory, py::arg("tensor"), "False for a tensor that was vacated.");
  module.def("is_remote", &smp::pipeline::is_remote, py::arg("tensor"));
  module.def(
      "in_frame", [] { return smp::pipeline::current_frame() != nullptr; },
      "Does this thread run a frame: do module calls issue instructions.");
}
