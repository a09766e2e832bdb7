// As much of the CUDA runtime as an emitted launcher calls, for a host compiler alone: launches and
// tensor maps are printed, as words and bytes of one line each, and not made.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaDevAttrMultiProcessorCount = 16 };
enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
#define CUDART_VERSION 13000

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline int sm_count = 0;

inline cudaError_t cudaFuncSetAttribute(const void*, int, int bytes) {
  std::printf("smem %d\n", bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = sm_count;
  return cudaSuccess;
}
inline cudaError_t cudaMallocAsync(void** pointer, std::size_t, cudaStream_t) {
  *pointer = reinterpret_cast<void*>(0xc0de);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void*, int, std::size_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaFreeAsync(void*, cudaStream_t) { return cudaSuccess; }

template <typename T>
void print_bytes(const T& value) {
  unsigned char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  std::printf("argument ");
  for (const unsigned char byte : bytes) std::printf("%02x", byte);
  std::printf("\n");
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*)(Parameters...),
                               Arguments&&... arguments) {
  const dim3 grid = config->gridDim, block = config->blockDim;
  std::printf("launch %u %u %u %u %u %u %zu %zu\n", grid.x, grid.y, grid.z, block.x, block.y,
              block.z, config->dynamicSmemBytes, reinterpret_cast<std::size_t>(config->stream));
  (print_bytes<Parameters>(arguments), ...);
  return cudaSuccess;
}

inline int encode_tiled(void* map, int type, unsigned rank, void* address, const std::uint64_t* sizes,
                        const std::uint64_t* strides, const std::uint32_t* box,
                        const std::uint32_t* steps, int interleave, int swizzle, int promotion,
                        int fill) {
  std::memcpy(map, &address, sizeof(address));
  std::printf("map %d %u %zu", type, rank, reinterpret_cast<std::size_t>(address));
  for (unsigned i = 0; i < rank; ++i) std::printf(" %zu", static_cast<std::size_t>(sizes[i]));
  for (unsigned i = 1; i < rank; ++i) std::printf(" %zu", static_cast<std::size_t>(strides[i - 1]));
  for (unsigned i = 0; i < rank; ++i) std::printf(" %u", box[i]);
  for (unsigned i = 0; i < rank; ++i) std::printf(" %u", steps[i]);
  std::printf(" %d %d %d %d\n", interleave, swizzle, promotion, fill);
  return 0;
}

// The first look-up fails.
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, int,
                                                    cudaDriverEntryPointQueryResult* found) {
  static int calls = 0;
  *found = cudaDriverEntryPointSuccess;
  *function = reinterpret_cast<void*>(encode_tiled);
  return ++calls == 1 ? cudaErrorNotSupported : cudaSuccess;
}
