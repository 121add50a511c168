// Loaded beside runtime.cpp: the library by which torch asks about the devices of a machine. It knows nothing of them.
//
// torch asks it whether processes can share a device's memory before it maps the first piece of any (expandable
// segments), and which others run on a device when its memory is used up.

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int kSuccess = 0, kNotFound = 6;

EXPORT int nvmlInit_v2() { return kSuccess; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = nullptr, kSuccess; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType() { return kNotFound; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return kNotFound; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, kSuccess; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2() { return kNotFound; }
