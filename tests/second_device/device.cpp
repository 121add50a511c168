// A device for torch whose memory is the host's: see the package's docstring.
//
// Every operation is a boxed fallback: tensors of the device are handed to the CPU's kernels as CPU tensors over the
// same memory, and what comes out is a tensor of the device again. So numbers are the CPU's, bit for bit, and
// everything else is as on an accelerator: the device type, errors about mixed devices, random numbers of its own, a
// thread of autograd's, an allocator that counts and runs out of memory.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/MTIAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

// MTIA is a type that torch knows as an accelerator with dense tensors, and that nobody has at home.
constexpr auto kType = c10::DeviceType::MTIA;
constexpr auto kKey = c10::DispatchKey::MTIA;
constexpr int kFreed = 0xFF;  // NaN in every floating-point type: who reads what is free or was not written sees it

thread_local c10::DeviceIndex current_device = 0;

// ---------------------------------------------------------------------------------------------------------- memory

std::atomic<int64_t> allocated{0}, peak{0}, limit{0};

void count(int64_t nbytes) {
  int64_t now = allocated += nbytes;
  int64_t before = peak.load();
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
}

void must_fit(int64_t nbytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, allocated + nbytes <= limit, "mtia out of memory. Tried to allocate ", nbytes,
                   " bytes, ", allocated.load(), " of ", limit.load(), " are allocated.");
}

struct Block {
  void* memory;
  size_t nbytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  std::memset(block->memory, kFreed, block->nbytes);
  std::free(block->memory);
  allocated -= static_cast<int64_t>(block->nbytes);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device(kType, current_device);
    if (nbytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    must_fit(static_cast<int64_t>(nbytes));
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 64, nbytes) == 0, "The host has no memory left for the device.");
    std::memset(memory, kFreed, nbytes);
    count(static_cast<int64_t>(nbytes));
    return {memory, new Block{memory, nbytes}, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};
Allocator allocator;

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  auto memory = allocator.allocate(nbytes);
  auto kept = std::min(nbytes, storage.nbytes());
  if (kept > 0) std::memcpy(memory.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(nbytes);
}

// ------------------------------------------------------------------------------------- what torch asks of a device

c10::Stream the_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, index < 0 ? current_device : index));
}

// All work is done when it was asked for, so every event has happened and every stream is empty.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return the_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return the_stream(device.index()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return the_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static int happened;
    *event = &happened;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

at::Generator& generator() {
  static at::Generator made = at::detail::createCPUGenerator();
  return made;
}

}  // namespace

// Not in the namespace above: it is registered under its own name.
struct SecondDeviceHooks final : at::MTIAHooksInterface {
  SecondDeviceHooks() = default;
  SecondDeviceHooks(at::MTIAHooksArgs) {}  // what older versions of torch call
  bool hasMTIA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getDeviceCount() const override { return 1; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Stream getCurrentStream(c10::DeviceIndex index) const override { return the_stream(index); }
  c10::Stream getDefaultStream(c10::DeviceIndex index) const override { return the_stream(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator(); }
};

namespace {

// -------------------------------------------------------------------------------------------------- the fallback

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

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

  at::Tensor to_device(const at::Tensor& host) {
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
    return tensor;
  }

  // Kernels give outputs another size; the tensors of the device follow.
  void adopt_sizes() {
    for (auto& [host, tensor] : originals_) {
      auto moved = host->unsafe_storage().data() != tensor.storage().data();
      if (!moved && host->sizes() == tensor.sizes() && host->strides() == tensor.strides()) continue;
      auto nbytes = host->unsafe_storage().nbytes();
      if (nbytes != tensor.storage().nbytes()) resize_storage(tensor.storage(), nbytes);
      if (nbytes > 0) std::memcpy(tensor.storage().mutable_data(), host->unsafe_storage().data(), nbytes);
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host->sizes(), host->strides(), host->storage_offset());
    }
  }

 private:
  struct Owned {
    c10::Storage storage;
    int64_t nbytes;
  };

  static void release(void* context) {
    auto* owned = static_cast<Owned*>(context);
    allocated -= owned->nbytes;
    delete owned;
  }

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

  // Memory that a kernel has made becomes the device's, without a copy.
  c10::Storage device_storage(const c10::Storage& host) {
    auto* key = host.unsafeGetStorageImpl();
    if (auto known = device_storages_.find(key); known != device_storages_.end()) return known->second;
    auto nbytes = static_cast<int64_t>(host.nbytes());
    must_fit(nbytes);
    count(nbytes);
    c10::DataPtr memory(host.mutable_data(), new Owned{host, nbytes}, &release, c10::Device(kType, current_device));
    c10::Storage made(c10::Storage::use_byte_size_t{}, host.nbytes(), std::move(memory), &allocator, true);
    device_storages_.emplace(key, made);
    return made;
  }

  std::unordered_map<c10::TensorImpl*, at::Tensor> hosts_, originals_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_storages_, device_storages_;
  std::unordered_map<c10::StorageImpl*, at::Tensor> viewed_;
};

// What takes tensors of the host beside those of a device on real accelerators, too.
bool may_mix(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_pack_padded_sequence", "aten::_ctc_loss",
      "aten::_ctc_loss_backward"};
  return names.count(name) > 0;
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto inputs = schema.arguments().size();
  const auto begin = stack->size() - inputs;
  Call call;
  std::vector<at::Tensor> alive;
  bool has_ours = false, has_hosts = false;
  auto take = [&](const at::Tensor& tensor) {
    alive.push_back(tensor);
    has_ours |= is_ours(tensor);
    has_hosts |= tensor.defined() && !is_ours(tensor) && tensor.dim() > 0;  // scalars may be anywhere
    return call.to_host(tensor);
  };
  for (size_t number = 0; number < inputs; ++number) {
    auto& value = (*stack)[begin + number];
    if (value.isTensor()) {
      value = take(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> taken;
      for (const at::Tensor& tensor : value.toTensorVector()) taken.push_back(take(tensor));
      value = taken;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> taken;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        taken.push_back(tensor.has_value() ? std::optional<at::Tensor>(take(*tensor)) : std::nullopt);
      }
      value = taken;
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isNone() && schema.arguments()[number].type()->str() == "Generator?") {
      value = generator();
    }
  }
  TORCH_CHECK(!(has_ours && has_hosts) || may_mix(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, mtia and cpu! (",
              op.operator_name(), ")");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.adopt_sizes();
  for (size_t position = stack->size() - schema.returns().size(); position < stack->size(); ++position) {
    auto& value = (*stack)[position];
    if (value.isTensor()) {
      value = call.to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> returned;
      for (const at::Tensor& tensor : value.toTensorVector()) returned.push_back(call.to_device(tensor));
      value = returned;
    }
  }
}

// ---------------------------------------------------------------------- what a fallback cannot do: memory and types

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(kKey),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  Call call;
  call.to_host(target).copy_(call.to_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_to(at::Tensor& self, const c10::Storage& storage, c10::IntArrayRef size, c10::IntArrayRef stride,
                   int64_t offset) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_to_part(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return set_to(self, storage, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
}

at::Tensor& set_to_all(at::Tensor& self, at::Storage storage) {
  int64_t length = static_cast<int64_t>(storage.nbytes()) / self.itemsize();
  return set_to(self, storage, {length}, {int64_t(1)}, 0);
}

at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_to(self, source.storage(), source.sizes(), source.strides(), source.storage_offset());
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  c10::Storage nothing(c10::Storage::use_byte_size_t{}, 0, allocator.allocate(0), &allocator, true);
  return set_to(self, nothing, {int64_t(0)}, {int64_t(1)}, 0);
}

void record_stream(at::Tensor&, at::Stream) {}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  bool has_bias = bias.has_value() && bias->defined();
  TORCH_CHECK(is_ours(input) && is_ours(weight) && (!has_bias || is_ours(*bias)),
              "Expected all tensors of a convolution to be on the same device, mtia");
  Call call;
  auto host_bias = has_bias ? std::optional<at::Tensor>(call.to_host(*bias)) : std::nullopt;
  return call.to_device(at::convolution_symint(call.to_host(input), call.to_host(weight), host_bias, stride, padding,
                                               dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  Call call;
  std::vector<c10::SymInt> bias = {transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto [a, b, c] = at::convolution_backward_symint(call.to_host(gradient), call.to_host(input), call.to_host(weight),
                                                   c10::SymIntArrayRef(bias), stride, padding, dilation, transposed,
                                                   output_padding, groups, mask);
  return {call.to_device(a), call.to_device(b), call.to_device(c)};
}

int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(_, MTIA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, MTIA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_to_part);
  m.impl("set_.source_Storage", &set_to_all);
  m.impl("set_.source_Tensor", &set_to_tensor);
  m.impl("set_", &set_to_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// What Python asks for (device.py).
TORCH_LIBRARY(second_device, m) {
  m.def("allocated() -> int", []() -> int64_t { return allocated; });
  m.def("peak() -> int", []() -> int64_t { return peak; });
  m.def("reset_peak() -> ()", []() { peak = allocated.load(); });
  m.def("limit() -> int", []() -> int64_t { return limit; });
  m.def("set_limit(int nbytes) -> ()", [](int64_t nbytes) { limit = nbytes; });
  m.def("seed(int seed) -> ()", [](int64_t seed) {
    std::lock_guard<std::mutex> lock(generator().mutex());
    generator().set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("random_state() -> Tensor", []() {
    std::lock_guard<std::mutex> lock(generator().mutex());
    return generator().get_state();
  });
  m.def("set_random_state(Tensor state) -> ()", [](const at::Tensor& state) {
    std::lock_guard<std::mutex> lock(generator().mutex());
    generator().set_state(state);
  });
}

}  // namespace

namespace at::native {
REGISTER_MTIA_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

namespace at {
REGISTER_MTIA_HOOKS(SecondDeviceHooks);
}

C10_REGISTER_GUARD_IMPL(MTIA, Guard);
REGISTER_ALLOCATOR(kType, &allocator);
