// The kernels of the second device: those of the CPU, over the device's memory (see the package's docstring).
//
// Every operation that has a kernel for CUDA and one for the CPU gets a boxed fallback instead of the first: tensors of
// the device are handed to the CPU's kernel as CPU tensors over the same memory, and what comes out is a tensor of the
// device again. What torch does without a kernel (allocating, copying bytes, views) stays CUDA's own.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/native/Copy.h>
#include <ATen/native/cuda/Resize.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/empty_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sum.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

extern "C" {  // runtime.cpp
void second_device_begin_kernel(cudaStream_t stream);
void second_device_end_kernel(cudaStream_t stream, const char* name, const uintptr_t* begins, const uintptr_t* ends,
                              const bool* writes, size_t count);
void second_device_poison(cudaStream_t stream, void* memory, size_t size);
void second_device_sleep(cudaStream_t stream, long microseconds);
}

namespace {

constexpr auto kType = c10::DeviceType::CUDA;
constexpr auto kKey = c10::DispatchKey::CUDA;

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// One kernel on the current stream, and what it reads and writes.
class Launch {
 public:
  explicit Launch(const char* name) : name_(name), stream_(c10::cuda::getCurrentCUDAStream()) {
    second_device_begin_kernel(stream_);
  }
  ~Launch() {
    second_device_end_kernel(stream_, name_, begins_.data(), ends_.data(), reinterpret_cast<const bool*>(writes_.data()),
                             begins_.size());
  }
  void touches(const at::Tensor& tensor, bool writes) {
    if (!tensor.has_storage() || tensor.numel() == 0) return;
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    begins_.push_back(begin);
    ends_.push_back(begin + (last + 1) * tensor.itemsize());
    writes_.push_back(writes);
  }

 private:
  const char* name_;
  cudaStream_t stream_;
  std::vector<uintptr_t> begins_, ends_;
  std::vector<char> writes_;
};

// One operation: tensors of the device as CPU tensors over the same memory, and back.
class Call {
 public:
  at::Tensor to_host(const at::Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    auto* impl = tensor.unsafeGetTensorImpl();
    if (auto known = hosts_.find(impl); known != hosts_.end()) return known->second;
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        host_storage(tensor), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* host_impl = host.unsafeGetTensorImpl();
    host_impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (impl->is_wrapped_number()) host_impl->set_wrapped_number(true);
    hosts_.emplace(impl, host);
    originals_.emplace(host_impl, tensor);
    return host;
  }

  at::Tensor to_device(const at::Tensor& host, Launch& launch) {
    if (!host.defined() || host.device().type() != c10::DeviceType::CPU) return host;
    if (auto original = originals_.find(host.unsafeGetTensorImpl()); original != originals_.end()) {
      return original->second;
    }
    auto viewed = viewed_.find(host.storage().unsafeGetStorageImpl());
    auto tensor = viewed == viewed_.end()
        ? at::detail::make_tensor<c10::TensorImpl>(device_storage(host.storage()), c10::DispatchKeySet(kKey),
                                                   host.dtype())
        : at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(viewed->second.storage()),
                                                   viewed->second.key_set(), host.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    launch.touches(tensor, true);
    return tensor;
  }

  // Kernels give outputs another size; the tensors of the device follow.
  void adopt_sizes() {
    for (auto& [host, tensor] : originals_) {
      auto moved = host->unsafe_storage().data() != tensor.storage().data();
      if (!moved && host->sizes() == tensor.sizes() && host->strides() == tensor.strides()) continue;
      auto nbytes = host->unsafe_storage().nbytes();
      if (nbytes > tensor.storage().nbytes()) {
        at::native::resize_bytes_cuda(tensor.storage().unsafeGetStorageImpl(), nbytes);
      }
      if (nbytes > 0) std::memcpy(tensor.storage().mutable_data(), host->unsafe_storage().data(), nbytes);
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host->sizes(), host->strides(), host->storage_offset());
    }
  }

 private:
  c10::Storage host_storage(const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    auto* key = storage.unsafeGetStorageImpl();
    auto known = host_storages_.find(key);
    if (known == host_storages_.end()) {
      c10::DataPtr memory(storage.mutable_data(), c10::Device(c10::DeviceType::CPU));
      c10::Storage host(c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(memory),
                        c10::GetAllocator(c10::DeviceType::CPU), true);
      viewed_.emplace(host.unsafeGetStorageImpl(), tensor);
      known = host_storages_.emplace(key, std::move(host)).first;
    }
    return known->second;
  }

  c10::Storage device_storage(const c10::Storage& host) {
    auto* key = host.unsafeGetStorageImpl();
    if (auto known = device_storages_.find(key); known != device_storages_.end()) return known->second;
    auto* allocator = c10::cuda::CUDACachingAllocator::get();
    c10::Storage made(c10::Storage::use_byte_size_t{}, host.nbytes(), allocator->allocate(host.nbytes()), allocator,
                      true);
    if (host.nbytes() > 0) std::memcpy(made.mutable_data(), host.data(), host.nbytes());
    device_storages_.emplace(key, made);
    return made;
  }

  std::unordered_map<c10::TensorImpl*, at::Tensor> hosts_, originals_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_storages_, device_storages_;
  std::unordered_map<c10::StorageImpl*, at::Tensor> viewed_;
};

// Random numbers follow the device's own generator: its seed and its offset decide them.
at::Generator host_generator(const std::optional<at::Generator>& given) {
  auto* generator =
      at::get_generator_or_default<at::CUDAGeneratorImpl>(given, at::cuda::detail::getDefaultCUDAGenerator());
  std::lock_guard<std::mutex> lock(generator->mutex_);
  auto state = generator->philox_cuda_state(4);
  return at::detail::createCPUGenerator(state.seed_.val * 0x9E3779B97F4A7C15u ^ state.offset_.val);
}

// What takes tensors of the host beside those of a device with CUDA's kernels, too.
bool may_mix(const std::string& name) {
  static const std::unordered_set<std::string> names = {"aten::index", "aten::index_put_", "aten::_index_put_impl_",
                                                        "aten::_ctc_loss", "aten::_ctc_loss_backward"};
  return names.count(name) > 0;
}

// An argument, or what is returned, with other tensors in it.
template <typename Change>
c10::IValue change_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      changed.push_back(tensor.has_value() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return changed;
  }
  return value;
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto inputs = schema.arguments().size();
  const auto begin = stack->size() - inputs;
  std::vector<std::pair<at::Tensor, bool>> ours;
  bool has_hosts = false;
  auto see = [&](const at::Tensor& tensor, bool writes) {
    if (is_ours(tensor)) ours.emplace_back(tensor, writes);
    has_hosts |= tensor.defined() && !is_ours(tensor) && tensor.dim() > 0;  // scalars may be anywhere
  };
  std::optional<c10::Device> device;
  for (size_t number = 0; number < inputs; ++number) {
    const auto& value = (*stack)[begin + number];
    const auto* alias = schema.arguments()[number].alias_info();
    bool writes = alias != nullptr && alias->isWrite();
    change_tensors(value, [&](const at::Tensor& tensor) {
      see(tensor, writes);
      return tensor;
    });
    if (value.isDevice()) {
      device = value.toDevice();
    }
  }
  TORCH_CHECK(ours.empty() || !has_hosts || may_mix(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, cuda and cpu! (",
              op.operator_name(), ")");
  for (const auto& [tensor, _] : ours) {
    TORCH_CHECK(tensor.device() == ours[0].first.device(),
                "Expected all tensors to be on the same device, but found at least two devices (", op.operator_name(),
                ")");
  }
  if (!ours.empty()) device = ours[0].first.device();
  c10::OptionalDeviceGuard guard(device);

  // CUDA's square root is the nearest number. The CPU's, which is MKL's, is so only if computed in double precision.
  const bool is_root = schema.name() == "aten::sqrt" && schema.overload_name().empty() && !ours.empty() &&
                       ours[0].first.scalar_type() == at::kFloat;
  Launch launch(schema.name().c_str());
  for (const auto& [tensor, writes] : ours) launch.touches(tensor, writes);
  Call call;
  for (size_t number = 0; number < inputs; ++number) {
    auto& value = (*stack)[begin + number];
    value = change_tensors(value, [&](const at::Tensor& tensor) {
      auto host = call.to_host(tensor);
      return is_root ? host.to(at::kDouble) : host;
    });
    if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (schema.arguments()[number].type()->str() == "Generator?") {
      value = host_generator(value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator()));
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.adopt_sizes();
  for (size_t position = stack->size() - schema.returns().size(); position < stack->size(); ++position) {
    auto& value = (*stack)[position];
    value = change_tensors(value, [&](const at::Tensor& tensor) {
      return call.to_device(is_root ? tensor.to(at::kFloat) : tensor, launch);
    });
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // an error that an earlier call has left
}

// ------------------------------------------------------------------------------------ what a fallback cannot do

void poison_what_is_freed() {
  using c10::cuda::CUDACachingAllocator::TraceEntry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const TraceEntry& entry) {
    if (entry.action_ == TraceEntry::FREE_COMPLETED) {
      c10::cuda::CUDAGuard guard(entry.device_);  // or a default stream would be that of the current device
      second_device_poison(reinterpret_cast<cudaStream_t>(entry.stream_), reinterpret_cast<void*>(entry.addr_),
                           entry.size_);
    }
  });
}

void poison(const at::Tensor& tensor) {
  static std::once_flag once;  // not before the first allocation, when the allocator exists
  std::call_once(once, poison_what_is_freed);
  Launch launch("empty");
  launch.touches(tensor, true);
  if (tensor.nbytes() > 0) std::memset(tensor.mutable_data_ptr(), 0xFF, tensor.storage().nbytes());
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  auto made = at::native::empty_cuda(C10_AS_INTARRAYREF_SLOW(size), dtype, layout, device, pin, format);
  poison(made);
  return made;
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  c10::OptionalDeviceGuard guard(device);
  auto made = at::native::empty_strided_cuda(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), dtype,
                                             layout, device, pin);
  poison(made);
  return made;
}

// CUDA's own copy wherever it copies bytes; converting and rearranging are kernels.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool bytes_only = self.sizes() == source.sizes() && self.dtype() == source.dtype() &&
                    self.strides() == source.strides() && self.is_non_overlapping_and_dense() &&
                    self.is_neg() == source.is_neg() && self.is_conj() == source.is_conj();
  if (bytes_only) return at::native::copy_(self, source, non_blocking);
  if (is_ours(self) && is_ours(source) && self.device() == source.device()) {
    c10::OptionalDeviceGuard guard(self.device());
    Launch launch("copy_");
    launch.touches(self, true);
    launch.touches(source, false);
    Call call;
    auto target = call.to_host(self);
    at::native::copy_(target, call.to_host(source), false);
    return self;
  }
  if (!is_ours(self)) {  // to the host: converted on the device, rearranged here
    auto converted = source.to(self.scalar_type()).contiguous();
    auto arrived = at::empty(converted.sizes(), self.options());
    at::native::copy_(arrived, converted, false);
    return self.copy_(arrived);
  }
  auto arrived = at::empty(source.sizes(), source.options().device(self.device()));
  at::native::copy_(arrived, source.contiguous(), non_blocking);
  return self.copy_(arrived);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {input, at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

// The CPU has no such kernel: there the norm is made of operations that each have a backward.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& gradient, const at::Tensor& input,
                                                     c10::IntArrayRef shape, const at::Tensor& scale,
                                                     const std::optional<at::Tensor>& weight, std::array<bool, 2>) {
  std::vector<int64_t> normalized, others;
  for (int64_t dim = 0; dim < input.dim(); ++dim) {
    (dim < input.dim() - static_cast<int64_t>(shape.size()) ? others : normalized).push_back(dim);
  }
  bool has_weight = weight.has_value() && weight->defined();
  auto output = input * scale;
  auto inner = has_weight ? gradient * *weight : gradient;
  auto of_input = scale * (inner - output * (inner * output).mean(normalized, true));
  auto of_weight = has_weight ? (gradient * output).sum(others).to(weight->dtype()) : at::Tensor();
  return {of_input.to(input.dtype()), of_weight};
}

// What this file has written itself, and what works on a device's memory without a kernel.
bool stays(const c10::FunctionSchema& schema) {
  static const std::unordered_set<std::string> names = {
      "aten::empty.memory_format", "aten::empty_strided", "aten::copy_", "aten::native_dropout", "aten::resize_",
      "aten::record_stream", "aten::set_", "aten::is_set_to", "aten::is_pinned", "aten::_pin_memory",
      "aten::_efficientzerotensor", "aten::_fused_sdp_choice"};
  auto full = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  if (names.count(full) || names.count(schema.name())) return true;
  for (const auto& returned : schema.returns()) {  // views
    if (returned.alias_info() != nullptr && !returned.alias_info()->isWrite()) return true;
  }
  return false;
}

std::vector<std::unique_ptr<torch::Library>> libraries;

int64_t take_over() {
  static std::unordered_set<std::string> taken;
  std::unordered_map<std::string, torch::Library*> of;
  int64_t count = 0;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op.has_value() || stays(op->schema())) continue;
    bool convolution = name.name == "aten::convolution" || name.name == "aten::convolution_backward";
    if (convolution && !name.overload_name.empty()) continue;
    if (!convolution && !(op->hasKernelForDispatchKey(kKey) && op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU))) {
      continue;
    }
    auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (!taken.insert(full).second) continue;
    auto space = name.name.substr(0, name.name.find("::"));
    auto& library = of[space];
    if (library == nullptr) {
      libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, space, kKey, __FILE__, __LINE__));
      library = libraries.back().get();
    }
    library->impl(full.substr(full.find("::") + 2).c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    ++count;
  }
  return count;
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("native_dropout", &native_dropout);
  m.impl("_fused_rms_norm_backward", &rms_norm_backward);
}

TORCH_LIBRARY(second_device, m) {
  m.def("take_over() -> int", &take_over);
  m.def("sleep(int microseconds) -> ()", [](int64_t microseconds) {
    second_device_sleep(c10::cuda::getCurrentCUDAStream(), microseconds);
  });
}

}  // namespace
