#include "smp/pipeline/remote_tensor.h"

#include <c10/core/DispatchKeySet.h>

namespace smp::pipeline {
namespace {

c10::DispatchKeySet remote_keys() {
  return c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::Fake, c10::DispatchKey::DeferredInit});
}

}  // namespace

void ReleaseQueue::push(Release release) noexcept {
  const std::lock_guard lock(mutex_);
  releases_.push_back(release);
  size_.store(releases_.size(), std::memory_order_relaxed);
}

std::vector<ReleaseQueue::Release> ReleaseQueue::take() {
  const std::lock_guard lock(mutex_);
  size_.store(0, std::memory_order_relaxed);
  return std::exchange(releases_, {});
}

RemoteImpl::RemoteImpl(Handle handle, const TensorMeta& meta)
    : TensorImpl(remote_keys(), c10::scalarTypeToTypeMeta(meta.dtype), c10::Device(c10::DeviceType::CPU)),
      handle_(std::move(handle)) {
  release_storage_and_set_meta_custom_data_ptr_error_msg_(std::string(
      "the data of a tensor that lives on another partition was asked for: read it with .item(), copy it into "
      "a local tensor (torch.empty(x.shape, dtype=x.dtype).copy_(x)), or return it from the @smp.step function"));
  set_storage_access_should_throw();
  set_sizes_and_strides(meta.sizes, meta.strides, meta.storage_offset);
}

c10::intrusive_ptr<c10::TensorImpl> RemoteImpl::shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                                        bool allow_tensor_metadata_change) const {
  TensorMeta meta{sizes().vec(), strides().vec(), c10::typeMetaToScalarType(dtype()), false, storage_offset()};
  auto copy = c10::make_intrusive<RemoteImpl>(handle_, meta);
  copy->set_version_counter(version_counter);
  copy->set_allow_tensor_metadata_change(allow_tensor_metadata_change);
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> RemoteImpl::shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                                        bool allow_tensor_metadata_change) const {
  return shallow_copy_and_detach(static_cast<const c10::VariableVersion&>(version_counter),
                                 allow_tensor_metadata_change);
}

void RemoteImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& source) {
  auto* remote = dynamic_cast<RemoteImpl*>(source.get());
  TORCH_CHECK(remote != nullptr,
              "the data of a tensor that lives on another partition can't be replaced by a local tensor");
  handle_ = remote->handle_;
  set_sizes_and_strides(remote->sizes(), remote->strides(), remote->storage_offset());
}

bool is_remote(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(c10::DispatchKey::DeferredInit) &&
         dynamic_cast<const RemoteImpl*>(tensor.unsafeGetTensorImpl()) != nullptr;
}

const Handle& handle_of(const at::Tensor& tensor) {
  return static_cast<const RemoteImpl*>(tensor.unsafeGetTensorImpl())->handle();
}

at::Tensor make_remote(Handle handle, const TensorMeta& meta) {
  return at::detail::make_tensor<RemoteImpl>(std::move(handle), meta);
}

}  // namespace smp::pipeline
