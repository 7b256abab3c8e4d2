#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace smp::partition {

/// A parameter that a module owns directly. Modules that give the same id share the parameter.
struct Parameter {
  std::uint64_t id = 0;
  std::int64_t bytes = 0;
};

/// What a module itself costs, without what is below it.
struct Cost {
  double memory_bytes = 0;
  double compute = 0;
};

/// A model as a tree of modules, one entry for each module object, with costs.
///
/// Modules are numbered in the order in which they are added, which is the order of first execution as far as it is
/// known; the root comes first and a parent before its children. A parameter's bytes are both its memory and its
/// compute, and count once, at the first module that owns it.
class ModuleTree {
 public:
  static constexpr int kNoParent = -1;

  /// Adds a module and returns its number. Throws UsageError when `parent` is no earlier module (kNoParent for the
  /// first), or a size is negative.
  int add(std::string name, int parent, const std::vector<Parameter>& parameters);

  [[nodiscard]] int size() const { return static_cast<int>(modules_.size()); }
  [[nodiscard]] const std::string& name(int module) const { return at(module).name; }
  [[nodiscard]] int parent(int module) const { return at(module).parent; }
  [[nodiscard]] const std::vector<int>& children(int module) const { return at(module).children; }
  [[nodiscard]] const Cost& own_cost(int module) const { return at(module).own_cost; }
  /// True if the module owns a parameter directly, be it shared or not.
  [[nodiscard]] bool owns_parameters(int module) const { return at(module).owns_parameters; }
  /// The earliest of the modules that are tied to this one by shared parameters, directly or through others; the
  /// module itself where there is none. Only the direct owners of a parameter are tied, never their ancestors.
  [[nodiscard]] int tied_to(int module) const;

 private:
  struct Module {
    std::string name;
    int parent = kNoParent;
    std::vector<int> children;
    Cost own_cost;
    bool owns_parameters = false;
    int tied_to = 0;  // an earlier module of the same tie, or the module itself: a union-find forest
  };

  [[nodiscard]] const Module& at(int module) const { return modules_.at(static_cast<std::size_t>(module)); }
  void tie(int one, int other);

  std::vector<Module> modules_;
  std::unordered_map<std::uint64_t, int> first_owner_;
};

}  // namespace smp::partition
