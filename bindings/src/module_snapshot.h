// What modules hold in Python, to run their code from there again. All functions need the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

namespace smp {

/// The attributes of some modules, and which tensors their buffers were.
class ModuleSnapshot {
 public:
  using Entry = std::pair<pybind11::object, pybind11::object>;  // key, value
  struct Dict {
    pybind11::dict dict;
    std::vector<Entry> entries;
  };

  explicit ModuleSnapshot(std::vector<Dict> dicts) : dicts_(std::move(dicts)) {}

  /// Gives the modules these attributes. Other code never sees a module without its attributes.
  void put_back() const;
  /// Do the modules hold the very same objects?
  [[nodiscard]] bool is_now() const;

 private:
  std::vector<Dict> dicts_;
};

class ModuleWatch {
 public:
  explicit ModuleWatch(const pybind11::sequence& modules);

  /// Tensors that have a graph are without it: only values count when code runs again, and earlier graphs are not kept.
  std::shared_ptr<ModuleSnapshot> at_entry();
  [[nodiscard]] std::shared_ptr<ModuleSnapshot> now() const;

 private:
  [[nodiscard]] std::vector<ModuleSnapshot::Dict> read() const;

  std::vector<pybind11::dict> dicts_;
  std::shared_ptr<ModuleSnapshot> last_;
};

}  // namespace smp
