#include "smp/pipeline/value_table.h"

#include <algorithm>
#include <unordered_set>

namespace smp::pipeline {

void ValueTable::store(ValueId id, at::Tensor data, Trash& trash) {
  const auto it = entries_.try_emplace(id).first;
  it->second.data = std::move(data);
  it->second.ready = true;
  reap(it, trash);
}

void ValueTable::store(ValueId id, std::shared_ptr<CallRecord> call, Trash& trash) {
  const auto it = entries_.try_emplace(id).first;
  it->second.call = std::move(call);
  it->second.ready = true;
  reap(it, trash);
}

void ValueTable::unpin(ValueId id, Trash& trash) {
  const auto it = entries_.find(id);
  if (it == entries_.end()) {
    return;
  }
  --it->second.pins;
  reap(it, trash);
}

void ValueTable::release(ValueId id, Trash& trash) {
  const auto it = entries_.try_emplace(id).first;
  it->second.released = true;
  reap(it, trash);
}

void ValueTable::lend_to_writer(ValueId id, FrameId frame) {
  auto& writers = entries_[id].writers;
  if (std::find(writers.begin(), writers.end(), frame) == writers.end()) {
    writers.push_back(frame);
    ++num_writers_;
  }
}

void ValueTable::give_back(ValueId id, FrameId frame) {
  const auto it = entries_.find(id);
  if (it != entries_.end()) {
    auto& loans = it->second.loans;
    const auto loan = std::find(loans.begin(), loans.end(), frame);
    if (loan != loans.end()) {
      loans.erase(loan);
    }
    num_writers_ -= std::erase(it->second.writers, frame);
  }
}

bool ValueTable::written_beyond(ValueId id, const std::vector<FrameId>& ancestors) const {
  const auto it = entries_.find(id);
  return it != entries_.end() && std::any_of(it->second.writers.begin(), it->second.writers.end(), [&](FrameId frame) {
           return std::find(ancestors.begin(), ancestors.end(), frame) == ancestors.end();
         });
}

bool ValueTable::ready(ValueId id) const {
  const auto it = entries_.find(id);
  return it != entries_.end() && it->second.ready;
}

bool ValueTable::lent_beyond(ValueId id, const std::vector<FrameId>& ancestors) const {
  const auto it = entries_.find(id);
  return it != entries_.end() && std::any_of(it->second.loans.begin(), it->second.loans.end(), [&](FrameId frame) {
           return std::find(ancestors.begin(), ancestors.end(), frame) == ancestors.end();
         });
}

const ValueTable::Entry& ValueTable::at(ValueId id) const {
  const auto it = entries_.find(id);
  if (it == entries_.end() || !it->second.ready) {
    throw_failure("value {} is not in the table of this rank", id);
  }
  return it->second;
}

const at::Tensor& ValueTable::value(ValueId id) const { return at(id).data; }

const std::shared_ptr<CallRecord>& ValueTable::call(ValueId id) const { return at(id).call; }

void ValueTable::reap(std::unordered_map<ValueId, Entry>::iterator entry, Trash& trash) {
  if (entry->second.released && entry->second.ready && entry->second.pins <= 0) {
    num_writers_ -= entry->second.writers.size();
    trash.push_back(std::move(entry->second));
    entries_.erase(entry);
  }
}

std::int64_t ValueTable::bytes() const {
  std::unordered_set<const void*> seen;  // aliases share one storage
  std::int64_t total = 0;
  for (const auto& [id, entry] : entries_) {
    if (entry.data.defined() && entry.data.has_storage() &&
        seen.insert(entry.data.storage().unsafeGetStorageImpl()).second) {
      total += static_cast<std::int64_t>(entry.data.storage().nbytes());
    }
  }
  return total;
}

std::size_t ValueTable::calls() const {
  return static_cast<std::size_t>(
      std::count_if(entries_.begin(), entries_.end(), [](const auto& item) { return item.second.call != nullptr; }));
}

ValueTable::Trash ValueTable::clear() {
  Trash trash;
  trash.reserve(entries_.size());
  for (auto& [id, entry] : entries_) {
    trash.push_back(std::move(entry));
  }
  entries_.clear();
  num_writers_ = 0;
  return trash;
}

}  // namespace smp::pipeline
