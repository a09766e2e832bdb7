// One PTX instruction per function, with types. Policy lives in the kernels.
// Names and semantics: "PTX ISA", the section named for each instruction.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

// The types of Q, K, V and O. Nothing is computed in them, so CUDA's headers, which define more
// and take a seventh of the time to compile, are not needed.
struct Half {  // fp16
  u16 bits;
};
struct Bfloat16 {  // bf16
  u16 bits;
};

DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- numbers ----

DEVICE float infinity() { return __int_as_float(0x7f800000); }

DEVICE float exp2_approx(float x) {  // ex2.approx: about 2 ulp, exp2(-inf) = 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats to one register of two 16-bit numbers, `low` in the lower half.
template <typename Element>
DEVICE u32 pack(float low, float high);

template <>
DEVICE u32 pack<Bfloat16>(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
DEVICE u32 pack<Half>(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// ---- named barriers: `count` threads, whole warps ----

DEVICE void barrier_sync(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

DEVICE void barrier_arrive(int id, int count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}
