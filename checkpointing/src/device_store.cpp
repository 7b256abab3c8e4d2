#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "smp/checkpointing/input_store.h"

namespace smp::checkpointing {
namespace {

class InputsOnDevice final : public SavedInputs {
 public:
  explicit InputsOnDevice(const std::vector<at::Tensor>& inputs) {
    for (const auto& x : inputs) {
      // Without its graph, which the region's outputs keep as long as it is needed.
      inputs_.push_back({torch::autograd::SavedVariable(x.tensor_data(), /*is_output=*/false), x.requires_grad()});
      bytes_ += x.layout() == c10::kStrided ? static_cast<std::int64_t>(x.nbytes()) : 0;
    }
  }

  std::vector<at::Tensor> load() override {
    std::vector<at::Tensor> inputs;
    for (const auto& input : inputs_) {
      inputs.push_back(input.data.unpack().tensor_data());
      inputs.back().set_requires_grad(input.requires_grad);
    }
    return inputs;
  }

  [[nodiscard]] std::int64_t bytes() const override { return bytes_; }

 private:
  struct Input {
    torch::autograd::SavedVariable data;
    bool requires_grad;
  };
  std::vector<Input> inputs_;
  std::int64_t bytes_ = 0;
};

class DeviceStore final : public InputStore {
 public:
  std::unique_ptr<SavedInputs> save(const std::vector<at::Tensor>& inputs) override {
    return std::make_unique<InputsOnDevice>(inputs);
  }
};

}  // namespace

std::shared_ptr<InputStore> device_store() {
  static const auto store = std::make_shared<DeviceStore>();
  return store;
}

}  // namespace smp::checkpointing
