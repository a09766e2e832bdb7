// Instructions that came with Ampere, one per function: cp.async, ldmatrix, mma.sync.
#pragma once
#include "ptx.cuh"

// ---- cp.async: global to shared memory, bytes past `source_bytes` written as zeros ----

// 16 bytes, past L1.
DEVICE void copy_async_16(void* shared, const void* global, int source_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(source_bytes)
               : "memory");
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `kPending` of this thread's latest groups are in flight.
template <int kPending>
DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- warp-level matrices: ldmatrix and mma.sync ----

// Four 8x8 matrices of 16-bit numbers; lane i gives the shared-memory address of row i % 8 of
// matrix i / 8.
DEVICE void load_matrix_x4(u32 (&fragment)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row)
               : "memory");
}

// The same, each matrix transposed on the way.
DEVICE void load_matrix_x4_transposed(u32 (&fragment)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row)
               : "memory");
}

// D(16 x 8, float) += A(16 x 16, row-major) * B(16 x 8, column-major); d and a are 4 registers.
// Lane t holds D at rows t/4 and t/4 + 8, columns 2*(t%4) and 2*(t%4) + 1.
template <typename Element>
DEVICE void mma_m16n8k16(float* d, const u32* a, u32 b0, u32 b1);

template <>
DEVICE void mma_m16n8k16<Bfloat16>(float* d, const u32* a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
DEVICE void mma_m16n8k16<Half>(float* d, const u32* a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
