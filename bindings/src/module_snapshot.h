// What modules hold in Python, to run their code from there again. All functions need the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

namespace smp {

/// What some dicts of modules held.
class ModuleSnapshot {
 public:
  using Entry = std::pair<pybind11::object, pybind11::object>;  // key, value
  struct Dict {
    pybind11::dict dict;
    std::vector<Entry> entries;
  };

  explicit ModuleSnapshot(std::vector<Dict> dicts) : dicts_(std::move(dicts)) {}

  /// Gives the dicts these entries, and no others but those of this library. Other code never sees one without its
  /// entries.
  void put_back() const;
  /// Do the dicts hold the very same objects?
  [[nodiscard]] bool is_now() const;
  /// For Python's garbage collector.
  int traverse(visitproc visit, void* arg) const;

 private:
  std::vector<Dict> dicts_;
};

class ModuleWatch {
 public:
  explicit ModuleWatch(std::vector<pybind11::dict> dicts) : dicts_(std::move(dicts)) {}

  /// Tensors that have a graph are without it: only values count when code runs again, and earlier graphs are not kept.
  std::shared_ptr<ModuleSnapshot> at_entry();
  [[nodiscard]] std::shared_ptr<ModuleSnapshot> now() const;
  /// Has anything changed since the last question? True the first time.
  bool changed();
  /// For Python's garbage collector.
  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  [[nodiscard]] std::vector<ModuleSnapshot::Dict> read() const;

  std::vector<pybind11::dict> dicts_;
  std::shared_ptr<ModuleSnapshot> last_;
};

}  // namespace smp
