// smp._C.trace_start and trace_stop: what the engine's threads did meanwhile.

#include <pybind11/pybind11.h>
#include <smp/pipeline/trace.h>

#include <utility>

namespace py = pybind11;

namespace {

using smp::pipeline::TraceKind;

const char* name_of(TraceKind kind) {
  switch (kind) {
    case TraceKind::kStep:
      return "step";
    case TraceKind::kIssue:
      return "issue";
    case TraceKind::kRun:
      return "run";
    case TraceKind::kWait:
      return "wait";
    case TraceKind::kStarve:
      return "starve";
    case TraceKind::kIdle:
      return "idle";
    case TraceKind::kSend:
      return "send";
    case TraceKind::kReceive:
      return "receive";
  }
  return "";
}

}  // namespace

void register_trace(py::module_& module) {
  module.def("trace_clock_ns", &smp::pipeline::trace_clock_ns);
  module.def(
      "trace_start", [] { smp::pipeline::trace().start(); }, "Raises SMPUsageError when a trace is on already.");
  module.def(
      "trace_stop",
      [] {
        const auto record = smp::pipeline::trace().stop();
        py::list events;
        for (const auto& e : record.events) {
          events.append(py::make_tuple(name_of(e.kind), e.name, e.begin_ns, e.end_ns, e.track, e.microbatch, e.step,
                                       e.id, e.peer, e.bytes, e.value_bytes));
        }
        py::dict result;
        result["events"] = std::move(events);
        result["begin_ns"] = record.begin_ns;
        result["end_ns"] = record.end_ns;
        result["dropped"] = record.dropped;
        return result;
      },
      "What was recorded since trace_start(): {events, begin_ns, end_ns, dropped}.");
}
