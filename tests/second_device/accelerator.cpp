// Loaded before torch (LD_PRELOAD): a torch that was built with CUDA says that its accelerator is CUDA, also where there
// is no GPU. Here it is the second device. No header of torch: its libraries are not loaded yet.

#include <cstdint>
#include <optional>

namespace c10 {
enum class DeviceType : int8_t { MTIA = 19 };
}

namespace at {
namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::MTIA; }
}  // namespace accelerator
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::MTIA; }  // its name before torch 2.9
}  // namespace at
