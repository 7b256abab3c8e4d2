// Where the inputs of a region wait for its backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace smp::checkpointing {

/// The inputs of one call of a region.
class SavedInputs {
 public:
  SavedInputs() = default;
  SavedInputs(const SavedInputs&) = delete;
  SavedInputs& operator=(const SavedInputs&) = delete;
  virtual ~SavedInputs() = default;

  /// The inputs again: leaves with the data and `requires_grad` of the originals. May be called several times; may
  /// block while data comes from elsewhere. Throws c10::Error when an input was changed in place since.
  virtual std::vector<at::Tensor> load() = 0;
  /// What is kept for them where they were, in bytes.
  [[nodiscard]] virtual std::int64_t bytes() const = 0;
};

/// One placement of saved inputs. Originals are never changed. Functions may be called by any thread.
class InputStore {
 public:
  InputStore() = default;
  InputStore(const InputStore&) = delete;
  InputStore& operator=(const InputStore&) = delete;
  virtual ~InputStore() = default;

  /// Does not block.
  virtual std::unique_ptr<SavedInputs> save(const std::vector<at::Tensor>& inputs) = 0;
};

/// Keeps inputs where they are, as autograd keeps what it saves: in-place changes are noticed, and saved-tensor hooks
/// of an enclosing region (or of the user) see them.
std::shared_ptr<InputStore> device_store();

}  // namespace smp::checkpointing
