// Loaded before CUDA's own runtime (LD_PRELOAD): devices whose memory is the host's, and whose streams are threads.
//
// What was given to a stream is done later, in its order: copies by its thread, after a while; kernels (kernels.cpp) at
// once, in the thread that launches them, but what they do only counts as done when the stream comes to it. Of all that
// reads or writes memory it is known what it comes after (a vector clock for each stream). Two of them that touch the
// same memory, one writing, with no order between them are a race, which ends the process: whether or not the numbers
// came out right this time. What the host does with memory that a copy is still to read or write shows in the numbers,
// but for copies that a kernel has come after: these are done. (LaggingBackend in tests/pipeline/weights sees to those.)

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Time = std::chrono::steady_clock::time_point;
constexpr int kPoison = 0xFF;

int number_from_environment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

// ------------------------------------------------------------------------------------------------ order in time

// How much of what was given to each stream has come before.
using Clock = std::vector<uint64_t>;

void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t stream = 0; stream < other.size(); ++stream) into[stream] = std::max(into[stream], other[stream]);
}

uint64_t at(const Clock& clock, size_t stream) { return stream < clock.size() ? clock[stream] : 0; }

struct Range {
  uintptr_t begin, end;
  bool writes;
};

struct Access {
  uint64_t number;
  Range range;
  const char* what;
};

struct Record {  // of an event
  std::atomic<bool> happened{false};
  Clock clock;
  Time time;
};

struct Job {
  uint64_t number;
  std::function<void()> run;  // empty for kernels
};

}  // namespace

struct CUevent_st {
  std::shared_ptr<Record> record;
};

namespace {

// Of all that follows. Never destroyed, as nothing here is: threads outlive `main`.
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;  // something was done

}  // namespace

struct CUstream_st {
  size_t index = 0;
  int device = 0;
  Clock clock;         // what comes before that which is given to it next
  uint64_t given = 0;  // how many jobs
  uint64_t done = 0;
  std::deque<uint64_t> copies;  // jobs that kernels have to wait for
  std::deque<Job> jobs;
  std::vector<Access> accesses;
  bool has_thread = false;
  std::condition_variable wakes;  // its thread
};

namespace {

std::vector<cudaStream_t>& streams = *new std::vector<cudaStream_t>;
Clock& host = *new Clock;  // what the host has seen done: every thread may have told every other
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

int device_count() {
  static int count = number_from_environment("SECOND_DEVICE_COUNT", 1);
  return count;
}

cudaStream_t new_stream() {
  auto* stream = new CUstream_st;
  stream->index = streams.size();
  stream->device = current_device;
  streams.push_back(stream);
  return stream;
}

// The default stream of the current device.
cudaStream_t resolve(cudaStream_t stream) {
  static std::unordered_map<int, cudaStream_t> defaults;
  if (reinterpret_cast<uintptr_t>(stream) > 2) return stream;  // 0, 1, 2: legacy and per-thread default
  auto& found = defaults[current_device];
  if (found == nullptr) found = new_stream();
  return found;
}

void pause_a_while(uint64_t number) {
  // as different as the numbers are; mostly short, so that tests end
  auto microseconds = (number * 2654435761u >> 7) % 97 == 0 ? 2000 : (number * 40503u >> 3) % 60;
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

void run_stream(cudaStream_t stream) {
  std::unique_lock lock(mutex);
  while (true) {
    stream->wakes.wait(lock, [&] { return !stream->jobs.empty(); });
    Job job = std::move(stream->jobs.front());
    stream->jobs.pop_front();
    if (job.run) {
      lock.unlock();
      job.run();
      lock.lock();
    }
    stream->done = job.number;
    if (!stream->copies.empty() && stream->copies.front() == job.number) stream->copies.pop_front();
    changed.notify_all();
  }
}

bool is_done(const Clock& clock) {
  for (size_t index = 0; index < clock.size(); ++index) {
    if (streams[index]->done < clock[index]) return false;
  }
  return true;
}

bool has_copies(const Clock& clock) {
  for (size_t index = 0; index < clock.size(); ++index) {
    const auto& copies = streams[index]->copies;
    if (!copies.empty() && copies.front() <= clock[index]) return true;
  }
  return false;
}

// The host knows that all this is done: who was seen doing it cannot race with what comes from now on.
void host_has_seen(const Clock& clock) {
  merge(host, clock);
  for (auto* stream : streams) {
    auto seen = at(host, stream->index);
    auto& accesses = stream->accesses;
    auto end = std::find_if(accesses.begin(), accesses.end(), [&](const auto& a) { return a.number > seen; });
    accesses.erase(accesses.begin(), end);
  }
}

void check_races(cudaStream_t stream, const std::vector<Range>& ranges, const char* what) {
  for (auto* other : streams) {
    if (other == stream) continue;
    auto known = at(stream->clock, other->index);
    for (auto access = other->accesses.rbegin(); access != other->accesses.rend(); ++access) {
      if (access->number <= known) break;
      for (const auto& range : ranges) {
        bool overlap = range.begin < access->range.end && access->range.begin < range.end;
        if (!overlap || !(range.writes || access->range.writes)) continue;
        std::fprintf(stderr, "RACE: %s, on stream %zu, %s [%zx, %zx). %s, on stream %zu, %s [%zx, %zx).\n", what,
                     stream->index, range.writes ? "writes" : "reads", range.begin, range.end, access->what,
                     other->index, access->range.writes ? "writes" : "reads", access->range.begin, access->range.end);
        std::abort();
      }
    }
  }
}

uint64_t give(cudaStream_t stream, std::function<void()> run, const std::vector<Range>& ranges, const char* what) {
  merge(stream->clock, host);
  if (!ranges.empty()) check_races(stream, ranges, what);
  auto number = ++stream->given;
  if (stream->clock.size() <= stream->index) stream->clock.resize(stream->index + 1);
  stream->clock[stream->index] = number;
  for (const auto& range : ranges) stream->accesses.push_back({number, range, what});
  bool wakes = bool(run);  // not for a kernel, which is done already: a switch of threads takes longer than most of them
  stream->jobs.push_back({number, std::move(run)});
  if (!stream->has_thread) {
    stream->has_thread = true;
    std::thread(run_stream, stream).detach();
  }
  if (wakes) stream->wakes.notify_one();
  return number;
}

// With a clock of its own: a stream's may go on meanwhile, by kernels of other threads, for which nobody wakes it.
void wait_for(std::unique_lock<std::mutex>& lock, const Clock clock) {
  for (size_t index = 0; index < clock.size(); ++index) {
    if (streams[index]->done < clock[index]) streams[index]->wakes.notify_one();
  }
  changed.wait(lock, [&] { return is_done(clock); });
  host_has_seen(clock);
}

// ------------------------------------------------------------------------------------------------------- memory

struct Region {
  uintptr_t end;
  cudaMemoryType type;
  int device;
};
std::map<uintptr_t, Region>& regions = *new std::map<uintptr_t, Region>;
std::unordered_map<int, size_t>& allocated = *new std::unordered_map<int, size_t>;

size_t total_memory() {
  static size_t total = size_t(number_from_environment("SECOND_DEVICE_MEGABYTES", 8192)) << 20;
  return total;
}

const Region* find(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = regions.upper_bound(address);
  if (next == regions.begin()) return nullptr;
  const auto& region = std::prev(next)->second;
  return address < region.end ? &region : nullptr;
}

void* map_memory(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

void add_region(void* memory, size_t size, cudaMemoryType type) {
  auto begin = reinterpret_cast<uintptr_t>(memory);
  regions[begin] = {begin + size, type, current_device};
}

Clock all_given() {
  Clock clock(streams.size());
  for (auto* stream : streams) clock[stream->index] = stream->given;
  return clock;
}

// Whoever frees memory waits for all that was given: as CUDA does.
cudaError_t free_memory(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  std::unique_lock lock(mutex);
  wait_for(lock, all_given());
  auto region = regions.find(reinterpret_cast<uintptr_t>(memory));
  if (region == regions.end()) return failed(cudaErrorInvalidValue);
  auto size = region->second.end - region->first;
  if (region->second.type == cudaMemoryTypeDevice) allocated[region->second.device] -= size;
  munmap(memory, size);
  regions.erase(region);
  return cudaSuccess;
}

}  // namespace

// ------------------------------------------------------------------------------------- for kernels (kernels.cpp)

// Before a kernel runs in this thread: what it reads must have arrived.
EXPORT void second_device_begin_kernel(cudaStream_t stream) {
  std::unique_lock lock(mutex);
  stream = resolve(stream);
  merge(stream->clock, host);
  // the clock may go on meanwhile: another thread frees what this kernel's outputs get, and it is filled with NaN later
  changed.wait(lock, [&] { return !has_copies(stream->clock); });
}

EXPORT void second_device_end_kernel(cudaStream_t stream, const char* name, const uintptr_t* begins,
                                     const uintptr_t* ends, const bool* writes, size_t count) {
  std::unique_lock lock(mutex);
  std::vector<Range> ranges;
  for (size_t number = 0; number < count; ++number) ranges.push_back({begins[number], ends[number], writes[number]});
  give(resolve(stream), nullptr, ranges, name);
}

// What is freed is filled with NaN, when the stream comes to it.
EXPORT void second_device_poison(cudaStream_t given, void* memory, size_t size) {
  std::unique_lock lock(mutex);
  auto stream = resolve(given);
  auto begin = reinterpret_cast<uintptr_t>(memory);
  std::vector<Range> range = {{begin, begin + size, true}};
  if (has_copies(stream->clock)) {
    stream->copies.push_back(give(stream, [=] { std::memset(memory, kPoison, size); }, range, "freeing"));
  } else {  // whatever kernels did is done
    std::memset(memory, kPoison, size);
    give(stream, nullptr, range, "freeing");
  }
}

EXPORT void second_device_sleep(cudaStream_t stream, long microseconds) {
  std::unique_lock lock(mutex);
  give(resolve(stream), [=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }, {}, "sleep");
}

// ------------------------------------------------------------------------------------------------------ devices

EXPORT cudaError_t cudaGetDeviceCount(int* count) { return *count = device_count(), cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {  // the header may call it ..._v2
  std::memset(properties, 0, sizeof(*properties));
  std::strcpy(properties->name, "second device");
  properties->totalGlobalMem = total_memory();
  properties->major = 9;
  properties->warpSize = 32;
  properties->multiProcessorCount = 1;
  properties->maxThreadsPerBlock = 1024;
  for (auto& size : properties->maxGridSize) size = 65535;
  properties->maxThreadsPerMultiProcessor = 2048;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
EXPORT cudaError_t cudaDeviceSynchronize() {
  std::unique_lock lock(mutex);
  wait_for(lock, all_given());
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof(*attributes));
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------- memory

EXPORT cudaError_t cudaMalloc(void** memory, size_t size) {
  std::unique_lock lock(mutex);
  *memory = nullptr;
  if (allocated[current_device] + size > total_memory()) return failed(cudaErrorMemoryAllocation);
  if (size == 0) return cudaSuccess;
  *memory = map_memory(size);
  if (*memory == nullptr) return failed(cudaErrorMemoryAllocation);
  allocated[current_device] += size;
  add_region(*memory, size, cudaMemoryTypeDevice);
  return cudaSuccess;
}
EXPORT cudaError_t cudaFree(void* memory) { return free_memory(memory); }
EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::unique_lock lock(mutex);
  *total = total_memory();
  *free = *total - allocated[current_device];
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostAlloc(void** memory, size_t size, unsigned int) {
  std::unique_lock lock(mutex);
  *memory = map_memory(std::max(size, size_t(1)));
  if (*memory == nullptr) return failed(cudaErrorMemoryAllocation);
  add_region(*memory, std::max(size, size_t(1)), cudaMemoryTypeHost);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMallocHost(void** memory, size_t size) { return cudaHostAlloc(memory, size, 0); }
EXPORT cudaError_t cudaFreeHost(void* memory) { return free_memory(memory); }
EXPORT cudaError_t cudaHostRegister(void* memory, size_t size, unsigned int) {
  std::unique_lock lock(mutex);
  auto begin = reinterpret_cast<uintptr_t>(memory);
  auto next = regions.lower_bound(begin + size);
  if (next != regions.begin() && std::prev(next)->second.end > begin) {
    return failed(cudaErrorHostMemoryAlreadyRegistered);
  }
  add_region(memory, size, cudaMemoryTypeHost);
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* memory) {
  std::unique_lock lock(mutex);
  wait_for(lock, all_given());
  return regions.erase(reinterpret_cast<uintptr_t>(memory)) ? cudaSuccess
                                                              : failed(cudaErrorHostMemoryNotRegistered);
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::unique_lock lock(mutex);
  std::memset(attributes, 0, sizeof(*attributes));
  const auto* region = find(pointer);
  attributes->type = region == nullptr ? cudaMemoryTypeUnregistered : region->type;
  attributes->device = region == nullptr ? -2 : region->device;
  if (region != nullptr) attributes->hostPointer = const_cast<void*>(pointer);
  if (region != nullptr && region->type == cudaMemoryTypeDevice) {
    attributes->devicePointer = const_cast<void*>(pointer);
    attributes->hostPointer = nullptr;
  }
  return cudaSuccess;
}

// ------------------------------------------------------------- memory that is mapped into addresses (the driver's)

// torch maps what it creates once, and releases it after that: the address gets its memory when it is mapped.
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  void* memory = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return memory == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  munmap(reinterpret_cast<void*>(address), size);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                            unsigned long long) {
  static bool maps = number_from_environment("SECOND_DEVICE_MAPS", 1);
  if (!maps) return CUDA_ERROR_NOT_SUPPORTED;
  std::unique_lock lock(mutex);
  int device = properties->location.id;
  if (allocated[device] + size > total_memory()) return CUDA_ERROR_OUT_OF_MEMORY;
  allocated[device] += size;
  *handle = reinterpret_cast<uintptr_t>(new std::pair<int, size_t>(device, size));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*,
                                              CUmemAllocationGranularity_flags) {
  return *size = 2 << 20, CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::unique_lock lock(mutex);
  auto* created = reinterpret_cast<std::pair<int, size_t>*>(handle);
  allocated[created->first] -= created->second;
  delete created;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t, CUmemGenericAllocationHandle handle,
                         unsigned long long) {
  std::unique_lock lock(mutex);
  mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE);
  regions[address] = {address + size, cudaMemoryTypeDevice, reinterpret_cast<std::pair<int, size_t>*>(handle)->first};
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  std::unique_lock lock(mutex);
  wait_for(lock, all_given());
  auto* memory = reinterpret_cast<void*>(address);
  mmap(memory, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  regions.erase(address);
  return CUDA_SUCCESS;
}
// torch 2.6 looks for all that it may ever call before it maps anything
#define NEVER_CALLED(name, ...) \
  EXPORT CUresult name(__VA_ARGS__) { return CUDA_ERROR_NOT_SUPPORTED; }
NEVER_CALLED(cuMemExportToShareableHandle, void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
             unsigned long long)
NEVER_CALLED(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType)
NEVER_CALLED(cuMemsetD32Async, CUdeviceptr, unsigned int, size_t, CUstream)
#undef cuStreamWriteValue32  // CUDA's headers give it a newer name
NEVER_CALLED(cuStreamWriteValue32, CUstream, CUdeviceptr, cuuint32_t, unsigned int)
NEVER_CALLED(cuMulticastAddDevice, CUmemGenericAllocationHandle, CUdevice)
NEVER_CALLED(cuMulticastBindMem, CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t,
             unsigned long long)
NEVER_CALLED(cuMulticastCreate, CUmemGenericAllocationHandle*, const CUmulticastObjectProp*)

// ------------------------------------------------------------------------------------------------------- copies

std::atomic<void (*)(size_t)> tell_of_pageable{nullptr};

// Has a function told of each copy of memory that is not page-locked, in the thread that asks for it.
EXPORT void second_device_tell_of_pageable(void (*tell)(size_t)) { tell_of_pageable = tell; }

EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind, cudaStream_t given) {
  if (size == 0) return cudaSuccess;
  std::unique_lock lock(mutex);
  auto stream = resolve(given);
  bool pageable = find(target) == nullptr || find(source) == nullptr;
  if (pageable && tell_of_pageable != nullptr) {
    lock.unlock();  // it is Python's, and may wait for a thread that waits here
    tell_of_pageable.load()(size);
    lock.lock();
  }
  auto to = reinterpret_cast<uintptr_t>(target), from = reinterpret_cast<uintptr_t>(source);
  if (pageable) wait_for(lock, stream->clock);  // it goes through memory of the driver's, while the host waits
  auto run = [=, number = stream->given + 1] {
    std::memset(target, kPoison, size);
    pause_a_while(number);
    std::memcpy(target, source, size);
  };
  stream->copies.push_back(give(stream, run, {{to, to + size, true}, {from, from + size, false}}, "a copy"));
  if (pageable) wait_for(lock, stream->clock);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind kind) {
  cudaMemcpyAsync(target, source, size, kind, nullptr);
  return cudaStreamSynchronize(nullptr);
}
EXPORT cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t given) {
  if (size == 0) return cudaSuccess;
  std::unique_lock lock(mutex);
  auto stream = resolve(given);
  auto to = reinterpret_cast<uintptr_t>(target);
  auto run = [=] { std::memset(target, value, size); };
  stream->copies.push_back(give(stream, run, {{to, to + size, true}}, "a fill"));
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------- streams and events

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  std::unique_lock lock(mutex);
  *stream = new_stream();
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t given) {
  std::unique_lock lock(mutex);
  wait_for(lock, resolve(given)->clock);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t given) {
  std::unique_lock lock(mutex);
  auto stream = resolve(given);
  if (stream->done < stream->given) {
    stream->wakes.notify_one();
    return cudaErrorNotReady;
  }
  host_has_seen(stream->clock);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  return *event = new CUevent_st, cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t given, unsigned int) {
  std::unique_lock lock(mutex);
  auto stream = resolve(given);
  auto record = std::make_shared<Record>();
  give(
      stream,
      [=] {
        record->time = std::chrono::steady_clock::now();
        record->happened = true;
      },
      {}, "an event");
  record->clock = stream->clock;
  event->record = std::move(record);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t given, cudaEvent_t event, unsigned int) {
  std::unique_lock lock(mutex);
  auto record = event->record;
  if (record == nullptr) return cudaSuccess;
  auto stream = resolve(given);
  merge(stream->clock, record->clock);
  give(
      stream,
      [=] {
        std::unique_lock waiting(mutex);
        changed.wait(waiting, [&] { return record->happened.load(); });
      },
      {}, "a wait");
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::unique_lock lock(mutex);
  auto record = event->record;
  if (record == nullptr) return cudaSuccess;
  if (!record->happened) return cudaErrorNotReady;
  host_has_seen(record->clock);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::unique_lock lock(mutex);
  auto record = event->record;
  if (record == nullptr) return cudaSuccess;
  changed.wait(lock, [&] { return record->happened.load(); });
  host_has_seen(record->clock);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  std::unique_lock lock(mutex);
  if (begin->record == nullptr || end->record == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (!begin->record->happened || !end->record->happened) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->record->time - begin->record->time).count();
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t given, cudaHostFn_t function, void* data) {
  std::unique_lock lock(mutex);
  give(resolve(given), [=] { function(data); }, {}, "a function");
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t given, cudaStreamCallback_t callback, void* data, unsigned int) {
  std::unique_lock lock(mutex);
  give(resolve(given), [=] { callback(given, cudaSuccess, data); }, {}, "a callback");
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return failed(cudaErrorNotSupported);
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return failed(cudaErrorNotSupported);
}

// ----------------------------------------------------------------- what takes other arguments in other versions, or is
// asked of the driver, as which torch finds this library

EXPORT cudaError_t first_of_many(cudaStream_t, cudaStreamCaptureStatus* status) __asm__("cudaStreamGetCaptureInfo");
cudaError_t first_of_many(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
EXPORT cudaError_t second_of_many(cudaStream_t, cudaStreamCaptureStatus*) __asm__("cudaStreamGetCaptureInfo_v2");
cudaError_t second_of_many(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return first_of_many(stream, status);
}
EXPORT cudaError_t entry_point(const char*, void** function, unsigned int, unsigned long long, int* result)
    __asm__("cudaGetDriverEntryPointByVersion");
cudaError_t entry_point(const char* name, void** function, unsigned int, unsigned long long, int* result) {
  static const auto nothing = [] { return CUDA_ERROR_NOT_SUPPORTED; };
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) *function = reinterpret_cast<void*>(+nothing);
  if (result != nullptr) *result = 0;
  return cudaSuccess;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int number) { return *device = number, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) { return *value = 0, CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned int*, int* active) { return *active = 1, CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult, const char** text) {
  return *text = "an error of the driver", CUDA_SUCCESS;
}
