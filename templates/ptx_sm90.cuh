// Hopper's own instructions, one per function: mbarrier, TMA, stmatrix, setmaxnreg, wgmma.
#pragma once
#include "ptx.cuh"

// `nvcc -arch=sm_90a` compiles for plain sm_90 as well, which has neither wgmma nor setmaxnreg.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasWgmma = true;
#else
constexpr bool kHasWgmma = false;
#endif

// What cuTensorMapEncodeTiled fills; cuda.h is not to be had under NVRTC.
struct alignas(128) TensorMap {
  u64 opaque[16];
};

// ---- mbarrier ----

DEVICE void mbarrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}

// Makes the initialised barriers visible to the asynchronous proxy (TMA).
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival, and `bytes` more that TMA must write before the phase ends.
DEVICE void mbarrier_arrive_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

DEVICE void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// An arrival at the same barrier of another block of the cluster, or of this one. It orders nothing
// beyond this block: with .release.cluster it would wait for all memory of the GPU.
DEVICE void mbarrier_arrive_at(u64* barrier, u32 block_rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(block_rank)
      : "memory");
}

// Until the phase of that parity has ended; a new barrier counts as having ended parity 1.
DEVICE void mbarrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred ready;\n"
      "wait_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ready, [%0], %1;\n"
      "@!ready bra wait_%=;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// ---- clusters: thread blocks that run side by side ----

// All threads of all blocks of the cluster meet.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// ---- TMA: boxes of a (column, row, head, batch) tensor ----

// Global to shared memory; elements outside the tensor arrive as zeros and count as bytes.
DEVICE void tma_load(void* shared, const TensorMap* map, int column, int row, int head, int batch,
                     u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(barrier))
      : "memory");
}

// The same to the same place in each block of the cluster, and to each one's barrier.
template <int kBlocks>
DEVICE void tma_load_multicast(void* shared, const TensorMap* map, int column, int row, int head,
                               int batch, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(barrier)),
      "h"(static_cast<unsigned short>((1 << kBlocks) - 1))
      : "memory");
}

DEVICE void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Shared to global memory; elements outside the tensor are not written.
DEVICE void tma_store(const TensorMap* map, const void* shared, int column, int row, int head,
                      int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(shared_address(shared)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until TMA has read what this thread's committed stores take from shared memory.
DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Orders this thread's ordinary shared-memory writes before later TMA and wgmma reads of them.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- warp-level matrices: stmatrix ----

// Four 8x8 matrices of 16-bit numbers to shared memory; lane i gives the place of row i % 8 of
// matrix i / 8, and holds of each matrix columns 2 * (i % 4) and + 1 of row i / 4.
DEVICE void store_matrix_x4(void* row, const u32 (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// ---- registers of a warpgroup ----

template <int kRegisters>
DEVICE void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- wgmma ----

// Before the first wgmma after registers or shared memory it reads were written.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps ptxas from hoisting the wait after this above the computation of `exponential`: a store
// depends on it, which is never made, as none is negative. Hoisted above all exponentials, the wait
// would leave none of them to run under the product.
DEVICE void wait_not_before(float exponential) {
  asm volatile(
      "{\n"
      ".reg .pred negative;\n"
      "setp.lt.f32 negative, %0, 0f00000000;\n"
      "@negative st.shared.f32 [%1], %0;\n"
      "}" ::"f"(exponential),
      "r"(0)
      : "memory");
}

// Keeps the compiler from moving uses of an accumulator above the wait before this.
template <int kCount>
DEVICE void pin_registers(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Shared-memory matrix descriptor ("PTX ISA", wgmma, matrix descriptor). Fields are in units of
// 16 bytes: start address, leading byte offset at bit 16, stride byte offset at bit 32; the
// swizzle is at bit 62, 1 for 128 bytes, 2 for 64 bytes.
template <int kSwizzleBytes>
DEVICE u64 matrix_descriptor(const void* start, u32 leading_bytes, u32 stride_bytes) {
  static_assert(kSwizzleBytes == 128 || kSwizzleBytes == 64, "other swizzles are not used");
  constexpr u64 kSwizzle = kSwizzleBytes == 128 ? 1 : 2;
  return (shared_address(start) & 0x3FFFF) >> 4 | static_cast<u64>(leading_bytes >> 4) << 16 |
         static_cast<u64>(stride_bytes >> 4) << 32 | kSwizzle << 62;
}
