// smp._C.Transport and smp._C.Communicator, and the errors of the library as Python exceptions.

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <smp/communicator.h>
#include <smp/error.h>
#include <smp/transport.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

void raise(const char* name, const char* message) {
  try {
    py::set_error(py::module_::import("smp.exceptions").attr(name), message);
  } catch (py::error_already_set& error) {
    error.restore();
  }
}

void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(std::move(pointer));
  } catch (const smp::UsageError& error) {
    raise("SMPUsageError", error.what());
  } catch (const smp::FailureError& error) {
    raise("SMPFailureError", error.what());
  } catch (const smp::Error& error) {
    raise("SMPError", error.what());
  }
}

// Destroying these waits for threads that may need the GIL.
template <typename T>
std::shared_ptr<T> destroyed_without_gil(std::shared_ptr<T> object) {
  T* pointer = object.get();
  return {pointer, [object = std::move(object)](T*) mutable {
            if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
              const py::gil_scoped_release release;
              object.reset();
            } else {
              object.reset();
            }
          }};
}

// Lets an interrupt leave a blocking call.
void check_signals() {
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

void register_transport(py::module_& module) {
  using smp::Transport;
  const py::call_guard<py::gil_scoped_release> without_gil;
  py::class_<Transport, std::shared_ptr<Transport>>(module, "Transport", "The connections of this rank.")
      .def_property_readonly("rank", &Transport::rank)
      .def_property_readonly("size", &Transport::size)
      .def("flush", &Transport::flush, without_gil, "Waits until all that was sent has left this rank.")
      .def("close", &Transport::close, without_gil,
           "Ends the traffic of this rank. Collective over MPI; finalizes MPI if this library initialised it.")
      .def("abandon", &Transport::abandon, without_gil,
           "close() for a job that has failed: waits for nobody and fails the other ranks.");
  module.def(
      "make_mpi_transport", [] { return destroyed_without_gil(smp::make_mpi_transport()); }, without_gil,
      "The transport between the processes of an MPI job. Collective over all of them.");
  module.def(
      "make_tcp_transport",
      [](int rank, int size, const std::function<std::vector<py::bytes>(py::bytes)>& exchange) {
        const smp::Exchange without_gil = [&](const std::string& own) {
          const py::gil_scoped_acquire acquire;
          std::vector<std::string> all;
          for (const py::bytes& each : exchange(py::bytes(own))) {
            all.emplace_back(each);
          }
          return all;
        };
        const py::gil_scoped_release release;
        return destroyed_without_gil(smp::make_tcp_transport(rank, size, without_gil, check_signals));
      },
      py::arg("rank"), py::arg("size"), py::arg("exchange"),
      "The transport over TCP between `size` processes. Collective. `exchange` tells bytes to all and gives all of "
      "them.");
  module.def(
      "make_local_transports",
      [](int size) {
        std::vector<std::shared_ptr<Transport>> transports = smp::make_local_transports(size);
        for (std::shared_ptr<Transport>& transport : transports) {
          transport = destroyed_without_gil(std::move(transport));
        }
        return transports;
      },
      py::arg("size"), without_gil, "One transport for each of several ranks in this process.");
}

void register_communicator(py::module_& module) {
  using smp::Communicator;
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator",
                                                          "Bytes between the scripts of different ranks.")
      .def(py::init([](std::shared_ptr<smp::Transport> transport) {
             return destroyed_without_gil(std::make_shared<Communicator>(std::move(transport)));
           }),
           py::arg("transport"))
      .def(
          "send",
          [](Communicator& communicator, int destination, const py::bytes& data) {
            const std::string_view view = data;
            const py::gil_scoped_release release;
            communicator.send(destination, view, check_signals);
          },
          py::arg("destination"), py::arg("data"), "Returns when recv() at the destination has taken the data.")
      .def(
          "recv",
          [](Communicator& communicator, int source) {
            std::string data;
            {
              const py::gil_scoped_release release;
              data = communicator.recv(source, check_signals);
            }
            return py::bytes(data);
          },
          py::arg("source"), "The next data that the source sent or broadcast to this rank.")
      .def(
          "broadcast",
          [](Communicator& communicator, const py::bytes& data, const std::vector<int>& members) {
            const std::string_view view = data;
            const py::gil_scoped_release release;
            communicator.broadcast(view, members, check_signals);
          },
          py::arg("data"), py::arg("members"), "Returns when recv() at all other members has taken the data.")
      .def(
          "allgather",
          [](Communicator& communicator, const py::bytes& data, const std::vector<int>& members) {
            const std::string_view view = data;
            std::vector<std::string> gathered;
            {
              const py::gil_scoped_release release;
              gathered = communicator.allgather(view, members, check_signals);
            }
            std::vector<py::bytes> result;
            result.reserve(gathered.size());
            for (const std::string& each : gathered) {
              result.emplace_back(each);
            }
            return result;
          },
          py::arg("data"), py::arg("members"), "The data of all members, in their order. Collective over them.")
      .def(
          "barrier",
          [](Communicator& communicator, const std::vector<int>& members) {
            communicator.barrier(members, check_signals);
          },
          py::arg("members"), py::call_guard<py::gil_scoped_release>(),
          "Returns when all members are here. Collective over them.")
      .def("leave", &Communicator::leave, py::call_guard<py::gil_scoped_release>(),
           "Tells the other ranks that this one starts no further operation: calls that wait for one raise "
           "SMPFailureError.")
      .def("fail", &Communicator::fail, py::arg("reason"), py::call_guard<py::gil_scoped_release>(),
           "Wakes all waiting calls on this rank with SMPFailureError; later ones raise it at once.");
}

}  // namespace

void register_core(py::module_& module) {
  py::register_local_exception_translator(translate);
  register_transport(module);
  register_communicator(module);
}
