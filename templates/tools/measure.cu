// What timing needs on the device: a gate that holds a stream, and random inputs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// One thread. Holds the stream until the host has written `ticket` or more to `opened` (pinned
// host memory), at least `shortest_ns` and at most `longest_ns`: what comes next in the stream is
// then in the queue already, and starts without the host.
extern "C" __global__ void gate(const volatile int* opened, int ticket,
                                unsigned long long shortest_ns, unsigned long long longest_ns,
                                unsigned long long* totals) {  // clocks, ns, gates that timed out
  const unsigned long long start = nanoseconds();
  const long long start_clock = clock64();
  unsigned long long waited = 0;
  bool is_open = false;
  while (waited < shortest_ns || (!is_open && waited < longest_ns)) {
    is_open = *opened >= ticket;
    waited = nanoseconds() - start;
  }
  totals[0] += clock64() - start_clock;
  totals[1] += waited;
  totals[2] += !is_open;
}

// A well mixed 64-bit function of its argument (the finaliser of SplitMix64).
__device__ unsigned long long mix(unsigned long long x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
  return x ^ x >> 31;
}

// Fills `values` with standard normal numbers, the same for the same seed (Box-Muller).
extern "C" __global__ void fill_normal(unsigned short* values, long long count,
                                       unsigned long long seed, int is_bf16) {
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i < count; i += threads) {
    const unsigned long long bits = mix(mix(seed) + i);
    const float first = (static_cast<unsigned int>(bits >> 32) + 0.5f) * 0x1p-32f;  // in (0, 1]
    const float second = static_cast<unsigned int>(bits) * 0x1p-32f;
    const float x = sqrtf(-2.0f * logf(first)) * cospif(2.0f * second);
    values[i] = is_bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x))
                        : __half_as_ushort(__float2half_rn(x));
  }
}
