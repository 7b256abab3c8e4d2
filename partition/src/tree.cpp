#include <smp/error.h>
#include <smp/partition/tree.h>

#include <algorithm>
#include <utility>

namespace smp::partition {

int ModuleTree::add(std::string name, int parent, const std::vector<Parameter>& parameters) {
  const int module = size();
  const bool parent_exists = module == 0 ? parent == kNoParent : parent >= 0 && parent < module;
  if (!parent_exists) {
    throw_usage("module '{}' has parent {}: it must be one of the {} modules added before (-1 for the first)", name,
                parent, module);
  }

  Module entry;
  entry.name = std::move(name);
  entry.parent = parent;
  entry.tied_to = module;
  entry.owns_parameters = !parameters.empty();
  for (const Parameter& parameter : parameters) {
    if (parameter.bytes < 0) {
      throw_usage("a parameter of module '{}' has {} bytes: at least 0 is needed", entry.name, parameter.bytes);
    }
  }
  modules_.push_back(std::move(entry));
  if (parent != kNoParent) {
    modules_[static_cast<std::size_t>(parent)].children.push_back(module);
  }

  for (const Parameter& parameter : parameters) {
    const auto [owner, is_first] = first_owner_.try_emplace(parameter.id, module);
    if (is_first) {
      const auto bytes = static_cast<double>(parameter.bytes);
      Cost& cost = modules_.back().own_cost;
      cost.memory_bytes += bytes;
      cost.compute += bytes;
    } else {
      tie(owner->second, module);
    }
  }
  return module;
}

int ModuleTree::tied_to(int module) const {
  while (at(module).tied_to != module) {
    module = at(module).tied_to;
  }
  return module;
}

void ModuleTree::tie(int one, int other) {
  const int first = tied_to(one);
  const int second = tied_to(other);
  const int earliest = std::min(first, second);
  // Both ends point at the earliest at once: with many ties to one module tied_to() would otherwise walk long chains.
  for (const int module : {first, second, one, other}) {
    modules_[static_cast<std::size_t>(module)].tied_to = earliest;
  }
}

}  // namespace smp::partition
