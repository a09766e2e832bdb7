// forward_bf16_d256_full_sm90.cu, written by fagen VERSION for sm90.
//
//   config  forward_sm90 128x64x256 stages=1 min_blocks_per_sm=1 lazy_rescale exp2_fma_every=0 head_grouping producer_registers=24 cluster=1 ping_pong overlap persistent dynamic_tiles q_stages=2
//   tuned   config chosen by hand, not tuned
//   launch  384 threads, 197632 bytes of dynamic shared memory; forward_bf16_d256_full_sm90_host.cu does it
//   build   nvcc -std=c++17 -arch=sm_90a -c forward_bf16_d256_full_sm90.cu

// fagen_forward_bf16_d256_full:
// forward attention, bf16, head dim 256, full mask.
//
// O = softmax(softmax_scale * Q K^T + mask) V for Hopper (sm_90a), after FlashAttention-3: one producer
// moves tiles by TMA into rings of shared-memory buffers, consumer warpgroups of 64 rows each multiply
// them with wgmma and keep scores, probabilities and output in registers.
//
// Written by fagen from forward_sm90.cu.j2 with the config
//   forward_sm90 128x64x256 stages=1 min_blocks_per_sm=1 lazy_rescale exp2_fma_every=0 head_grouping producer_registers=24 cluster=1 ping_pong overlap persistent dynamic_tiles q_stages=2

namespace fagen_forward_bf16_d256_full {

// Hopper's own instructions, one per function: mbarrier, TMA, stmatrix, setmaxnreg, wgmma.
// One PTX instruction per function, with types. Policy lives in the kernels.
// Names and semantics: "PTX ISA", the section named for each instruction.

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

using Element = Bfloat16;

constexpr int kHeadDimQk = 256;  // columns of Q and K
constexpr int kHeadDimV = 256;  // columns of V and O
constexpr bool kCausal = false;  // query i sees keys up to i + seqlen_k - seqlen_q
constexpr int kBlockM = 128;  // rows of Q per thread block
constexpr int kBlockN = 64;  // keys per step
constexpr int kBlockK = 256;  // columns of Q and K that one barrier carries
constexpr int kStages = 1;  // depth of the K ring and of the V ring
constexpr int kQStages = 2;  // buffers for Q and O: with 2, the next Q comes under the last O
constexpr int kConsumerWarpgroups = 2;  // 64 rows each
constexpr int kProducerRegisters = 24;  // a thread, after the shift; 0: one warp, no shift
constexpr int kConsumerRegisters = 240;  // per thread after the shift
constexpr int kMinBlocksPerSm = 1;
constexpr int kThreads = 384;  // consumers first, then the producer
constexpr int kCluster = 1;  // thread blocks that share a tile, and each load of K and V
constexpr bool kPingPong = true;  // consumer warpgroups take turns at the tensor cores
constexpr bool kOverlap = true;  // softmax of a block under the second product of the one before
constexpr bool kPersistent = true;  // a thread block loops over tiles
constexpr bool kDynamicTiles = true;  // and draws the next one from a counter
constexpr bool kLazyRescale = true;  // rescale O only when a maximum grew much
constexpr int kExp2FmaEvery = 0;  // see softmax.cuh; 0: no exponential on the FMA pipe
constexpr bool kHeadGrouping = true;  // tiles of several heads interleaved

// Columns of a tile in shared memory; TMA fills those past the head dim with zeros.
constexpr int kQkColumns = 256;
constexpr int kVColumns = 256;
constexpr int kChunk = 64;  // columns side by side in shared memory: one swizzle span
constexpr int kChunkBytes = kChunk * sizeof(Element);
constexpr int kSlices = kQkColumns / kBlockK;
constexpr int kQkSteps = 16;  // of Q K^T, 16 columns each, in one asm statement
constexpr int kConsumerThreads = kConsumerWarpgroups * 128;
constexpr int kQTileBytes = kBlockM * kQkColumns * sizeof(Element);
constexpr int kKTileBytes = kBlockN * kQkColumns * sizeof(Element);
constexpr int kVTileBytes = kBlockN * kVColumns * sizeof(Element);
constexpr int kTileRows = kCluster * kBlockM;  // a tile is the work of a cluster
constexpr bool kSkipBlocks = kCausal && kTileRows > 64;  // a warpgroup may see fewer keys than its tile
constexpr bool kBackAndForth = kCausal && !kHeadGrouping;

// What the host passes to every forward kernel; params_layout.cuh checks that it packs the same.

struct Strides {  // in elements; the head dim is contiguous
  long long batch, row, head;
};

template <typename Element>
struct ForwardParams {
  const Element* q;  // (batch, seqlen_q, heads_q, head_dim)
  const Element* k;  // (batch, seqlen_k, heads_kv, head_dim)
  const Element* v;  // (batch, seqlen_k, heads_kv, head_dim)
  Element* o;        // (batch, seqlen_q, heads_q, head_dim)
  float* lse;        // (batch, heads_q, seqlen_q), natural logarithm; null if not wanted
  Strides q_strides, k_strides, v_strides, o_strides;
  float scale_log2;  // softmax_scale * log2(e), above 0
  int batch, heads_q, heads_kv, seqlen_q, seqlen_k;
  int heads_per_group;  // heads that run side by side because their K and V fit L2 together
  int tiles;            // batch * heads_q * ceil(seqlen_q / rows of a tile)
};
// Which rows of which head a tile index means.

struct Tile {
  int first_row, head, batch;
};

// Tiles of one head follow each other, or, with kHeadGrouping, those of heads_per_group heads are
// interleaved so that their K and V stay in L2. Causal tiles with the most keys come first: the
// short ones then fill the last wave (longest processing time first).
template <int kTileRows, bool kCausal, bool kHeadGrouping, typename Params>
DEVICE Tile tile_at(int index, const Params& params) {
  const int m_blocks = (params.seqlen_q + kTileRows - 1) / kTileRows;
  int m_block, head_index;  // head_index counts heads through all sequences
  if constexpr (kHeadGrouping) {
    const int group = index / (m_blocks * params.heads_per_group);
    const int within = index - group * (m_blocks * params.heads_per_group);
    const int first_head = group * params.heads_per_group;
    const int heads = min(params.heads_per_group, params.batch * params.heads_q - first_head);
    m_block = within / heads;
    head_index = first_head + within - m_block * heads;
  } else {
    head_index = index / m_blocks;
    m_block = index - head_index * m_blocks;
  }
  if (kCausal) m_block = m_blocks - 1 - m_block;
  const int batch = head_index / params.heads_q;
  return {m_block * kTileRows, head_index - batch * params.heads_q, batch};
}
// Who gives a thread block its tiles, where a block has more than one.

// The tile of this cluster in a wave of as many tiles as there are clusters, dealt out beforehand.
// kBackAndForth: every other wave backwards, so that who had one of a head's longest tiles gets one
// of the shortest.
template <int kCluster, bool kBackAndForth>
DEVICE u32 tile_of_wave(u32 wave) {
  const u32 clusters = gridDim.x / kCluster, cluster = blockIdx.x / kCluster;
  const bool backwards = kBackAndForth && wave % 2 == 1;
  return wave * clusters + (backwards ? clusters - 1 - cluster : cluster);
}

// A tile that no block has had: the first gridDim.x are dealt out, the counter is for the rest. By
// one lane of a warp.
DEVICE u32 draw_tile(u32* counter, int tiles) {
  const u32 drawn = atomicAdd(counter, 1);
  // Each tile is followed by a draw, so this is the last one: 0 again, for the next launch.
  if (drawn + 1 == tiles) *counter = 0;
  // Through a shuffle, of the one lane that is here: the compiler then takes it for uniform, and
  // keeps what follows from it out of the producer's few registers.
  return gridDim.x + __shfl_sync(1, drawn, 0);
}
// Which keys a query sees. Everything in a kernel that asks so asks here.
// How a warp holds an accumulator, whichever instruction computes it: of 16 rows, lane t has the
// rows t/4 and t/4 + 8, and of each 8 columns the columns 2*(t%4) and 2*(t%4) + 1. Element i is in
// row t/4 + 8 * fragment_row(i) and column 2 * (t%4) + fragment_column(i).

DEVICE constexpr int fragment_row(int i) { return i / 2 % 2; }  // 0 or 1, of the lane's two rows

DEVICE constexpr int fragment_column(int i) { return 8 * (i / 4) + i % 2; }

// Four lanes hold a row.
DEVICE float row_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

DEVICE float row_total(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// The same elements in 16 bits, two to a register: they lie as the next product's operand A does.
template <typename Element, int kCount>
DEVICE void pack_fragment(u32 (&packed)[kCount / 2], const float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) packed[i / 2] = pack<Element>(values[i], values[i + 1]);
}

struct KeyRange {  // [begin, end)
  int begin, end;
};

// The keys that row `row` sees. Causal masks are aligned bottom-right: the last row sees every key,
// and rows above seqlen_q - seqlen_k see none.
template <bool kCausal, typename Params>
DEVICE KeyRange visible_keys(int row, const Params& params) {
  if (!kCausal) return {0, params.seqlen_k};
  return {0, max(0, min(params.seqlen_k, row + 1 + params.seqlen_k - params.seqlen_q))};
}

struct BlockRange {  // blocks of keys, [begin, end)
  static constexpr int begin = 0;  // no mask hides the first keys
  int end;
};

// Blocks of kBlockN keys that some row up to `last_row` sees.
template <bool kCausal, int kBlockN, typename Params>
DEVICE BlockRange seen_blocks(int last_row, const Params& params) {
  return {(visible_keys<kCausal>(last_row, params).end + kBlockN - 1) / kBlockN};
}

// Blocks that every row from `first_row` on sees whole.
template <bool kCausal, int kBlockN, typename Params>
DEVICE BlockRange whole_blocks(int first_row, const Params& params) {
  return {visible_keys<kCausal>(first_row, params).end / kBlockN};
}

// Sets the scores of keys that the lane's two rows do not see to -infinity. `first_key` is the key
// of the fragment's column 0.
template <int kCount>
DEVICE void hide_keys(float (&scores)[kCount], int first_key, const KeyRange (&visible)[2]) {
  const int lane_key = first_key + 2 * (threadIdx.x % 4);
  // Both counted from the lane's first column.
  const int lane_end[2] = {visible[0].end - lane_key, visible[1].end - lane_key};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scores[i] = fragment_column(i) < lane_end[fragment_row(i)] ? scores[i] : -infinity();
  }
}
// Online softmax over the rows of an accumulator fragment (FlashAttention, algorithm 1).

// exp2(x) on the FMA pipe: 2**integer * polynomial(fraction), fraction in [-1/2, 1/2]. The cubic
// minimises the largest relative error, 1e-4 (less than half an ulp of bf16). x <= 0.
DEVICE float exp2_polynomial(float x) {
  constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2**23
  x = fmaxf(x, -126.0f);
  const float shifted = x + kRoundToInteger;
  const float fraction = x - (shifted - kRoundToInteger);
  float p = fmaf(fraction, 0.0559229f, 0.2426131f);
  p = fmaf(fraction, p, 0.6931200f);
  p = fmaf(fraction, p, 0.99992522f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
}

// The running maximum and sum of a lane's two rows. Sums are the lane's own until `finish`.
template <bool kLazyRescale, int kExp2FmaEvery>
struct OnlineSoftmax {
  static constexpr float kLazyThreshold = 8.0f;  // log2 of how far P may exceed 1

  float maximum[2] = {-infinity(), -infinity()};
  float sum[2] = {0.0f, 0.0f};

  // Turns scores into exp2(scale_log2 * (score - maximum)) in place, and gives the factors that
  // what was accumulated before must be multiplied by. kMasked: scores may be -infinity, even all
  // of a row so far.
  template <bool kMasked, int kCount>
  DEVICE void update(float (&scores)[kCount], float scale_log2, float (&correction)[2]) {
    // Row after row: the first's exponentials need not wait for the second's maximum.
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float highest = maximum[row];
#pragma unroll
      for (int i = 2 * row; i < kCount; i += 4) {
        highest = fmaxf(highest, fmaxf(scores[i], scores[i + 1]));
      }
      highest = row_maximum(highest);
      if (kLazyRescale && (highest - maximum[row]) * scale_log2 <= kLazyThreshold) {
        highest = maximum[row];
      }
      float offset = highest * scale_log2;
      if (kMasked && highest == -infinity()) offset = 0.0f;  // -inf - -inf would be NaN
      correction[row] = exp2_approx(fmaf(maximum[row], scale_log2, -offset));
      maximum[row] = highest;
      sum[row] *= correction[row];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (fragment_row(i) != row) continue;
        const float x = fmaf(scores[i], scale_log2, -offset);
        // The polynomial has no exact 0 for the -infinity of a masked score.
        const bool on_fma_pipe =
            !kMasked && kExp2FmaEvery > 0 && i / 4 % max(kExp2FmaEvery, 1) == 0;
        scores[i] = on_fma_pipe ? exp2_polynomial(x) : exp2_approx(x);
        sum[row] += scores[i];
      }
    }
  }

  // Multiplies an output fragment by the factors of `update`; with kLazyRescale only if any row
  // of the warp needs it.
  template <int kCount>
  DEVICE static void rescale(float (&output)[kCount], const float (&correction)[2]) {
    if (kLazyRescale &&
        !__any_sync(0xffffffff, correction[0] != 1.0f || correction[1] != 1.0f)) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) output[i] *= correction[fragment_row(i)];
  }

  // After the last update: whole sums, and the natural logarithm of the sum of exponentials.
  DEVICE void finish(float scale_log2, float (&inverse_sum)[2], float (&lse)[2]) {
    constexpr float kLn2 = 0.693147180559945f;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float total = row_total(sum[row]);
      inverse_sum[row] = total == 0.0f ? 0.0f : __frcp_rn(total);  // a row without keys gives 0
      lse[row] = total == 0.0f ? -infinity() : (maximum[row] * scale_log2 + __log2f(total)) * kLn2;
    }
  }
};
// Tiles from global to shared memory by TMA.
// Rings of buffers in shared memory: a producer fills them by TMA, consumers read and return them.

// A position in a ring of buffers and the parity of its barriers.
template <int kDepth>
struct RingPosition {
  u32 stage = 0;  // unsigned: added to 64-bit descriptors as it is
  u32 parity = 0;

  DEVICE void advance() {
    if (++stage == kDepth) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The barriers of a ring of kDepth buffers, each of which arrives in kSlices parts.
template <int kDepth, int kSlices>
struct Ring {
  using Position = RingPosition<kDepth>;

  u64 (&full)[kDepth][kSlices];  // in shared memory
  u64 (&empty)[kDepth];

  // One thread, before all others. A buffer is empty again after `returns` arrivals.
  DEVICE void init(int stage, u32 returns) const {
    for (int slice = 0; slice < kSlices; ++slice) mbarrier_init(&full[stage][slice], 1);
    mbarrier_init(&empty[stage], returns);
  }

  // ---- the producer ----

  // Until the buffer is empty; at first at once, as a new barrier counts as having ended parity 1.
  DEVICE void acquire(const Position& at) const { mbarrier_wait(&empty[at.stage], at.parity ^ 1); }

  // `bytes` of a part are on their way.
  DEVICE void expect(const Position& at, int slice, u32 bytes) const {
    mbarrier_arrive_expect(&full[at.stage][slice], bytes);
  }

  // ---- a consumer ----

  // Until a part is there.
  DEVICE void wait(const Position& at, int slice) const {
    mbarrier_wait(&full[at.stage][slice], at.parity);
  }

  // Until all of it is there.
  DEVICE void wait(const Position& at) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) wait(at, slice);
  }

  // Returns the buffer and goes on to the next. Every warp arrives: each has its own view of when
  // its products are done. In a cluster, at all blocks: who loads a share waits for all.
  template <int kCluster>
  DEVICE void release(Position& at, int lane) const {
    if constexpr (kCluster == 1) {
      if (lane == 0) mbarrier_arrive(&empty[at.stage]);
    } else {
      if (lane < kCluster) mbarrier_arrive_at(&empty[at.stage], lane);
    }
    at.advance();
  }
};
// How a tile of 16-bit elements lies in shared memory: chunks of kChunk columns one after the
// other, the rows of a chunk one after the other, and in a row its 16-byte units exchanged
// (XOR-swizzled) as TMA and wgmma expect it, so that eight rows of a column unit lie in
// different banks.

// kChunk: 16, 32 or 64 columns, a swizzle of 2 * kChunk bytes.
template <typename TileElement, int kTileRows, int kTileChunk>
struct SwizzledTile {
  using Element = TileElement;
  static constexpr int kRows = kTileRows;
  static constexpr int kChunk = kTileChunk;
  static constexpr int kUnits = kChunk / 8;  // 16-byte units per row
  static constexpr int kChunkElements = kRows * kChunk;

  // In elements from the tile's base. For arguments that vary, unsigned ones give shifts and masks.
  template <typename Integer>
  DEVICE static Integer offset(Integer row, Integer column) {
    const Integer unit = (column % kChunk / 8) ^ (row / (8 / kUnits) % kUnits);
    return column / kChunk * kChunkElements + row * kChunk + unit * 8 + column % 8;
  }

  // The shared-memory address `rows` below and `columns` right of `address`, by one exclusive-or
  // and a constant. `rows` is a multiple of 16, `columns` of 8 with no bit that the column of
  // `address` has, and the tile lies at a multiple of the swizzle span.
  DEVICE static u32 moved(u32 address, int rows, int columns) {
    const int elements = columns / kChunk * kChunkElements + rows * kChunk;
    return (address ^ columns % kChunk * 2) + elements * 2;
  }
};

// Starts the copy of the chunk of columns at `column` of a tile of one head, from row `first_row`
// on. The blocks of a cluster load a share of the rows each, for all.
template <typename Tile, int kCluster>
DEVICE void load_chunk(typename Tile::Element* tile, const TensorMap* map, int column,
                       int first_row, int head, int batch, u64* full) {
  if constexpr (kCluster == 1) {
    tma_load(tile + Tile::offset(0, column), map, column, first_row, head, batch, full);
  } else {
    const int row = blockIdx.x % kCluster * (Tile::kRows / kCluster);
    tma_load_multicast<kCluster>(tile + Tile::offset(row, column), map, column, first_row + row,
                                 head, batch, full);
  }
}
// wgmma.mma_async for the two products of this kernel. The operand lists are written by fagen.
// D is 64 rows of a warpgroup, in float; each instruction is a step of depth 16. Steps with no wait
// between them are one asm statement: compile time goes with the operands of all statements.

// D(64 x 64) = A(64 x 256, shared memory) * B(256 x 64), plus D if accumulate
DEVICE void wgmma_qk(float (&d)[32], const u64 (&a)[16],
    const u64 (&b)[16], bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %64, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %48, accumulate, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%33, %49, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%34, %50, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%35, %51, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%36, %52, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%37, %53, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%38, %54, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%39, %55, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%40, %56, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%41, %57, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%42, %58, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%43, %59, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%44, %60, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%45, %61, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%46, %62, 1, 1, 1, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%47, %63, 1, 1, 1, 0, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a[0]), "l"(a[1]), "l"(a[2]), "l"(a[3]), "l"(a[4]), "l"(a[5]), "l"(a[6]), "l"(a[7]), "l"(a[8]), "l"(a[9]), "l"(a[10]), "l"(a[11]), "l"(a[12]), "l"(a[13]), "l"(a[14]), "l"(a[15]), "l"(b[0]), "l"(b[1]), "l"(b[2]), "l"(b[3]), "l"(b[4]), "l"(b[5]), "l"(b[6]), "l"(b[7]), "l"(b[8]), "l"(b[9]), "l"(b[10]), "l"(b[11]), "l"(b[12]), "l"(b[13]), "l"(b[14]), "l"(b[15]), "r"(static_cast<int>(accumulate)));
}

// D(64 x 256) = A(64 x 64, registers) * B(64 x 256), plus D if accumulate
DEVICE void wgmma_pv(float (&d)[128], const u32 (&a)[16],
    const u64 (&b)[4], bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %148, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "{%128, %129, %130, %131}, %144, accumulate, 1, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "{%132, %133, %134, %135}, %145, 1, 1, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "{%136, %137, %138, %139}, %146, 1, 1, 1, 1;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "{%140, %141, %142, %143}, %147, 1, 1, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "l"(b[0]), "l"(b[1]), "l"(b[2]), "l"(b[3]), "r"(static_cast<int>(accumulate)));
}


using Params = ForwardParams<Element>;
// Python packs the parameters: C++ has to lay them out the same.

#ifdef __CUDACC_RTC__  // NVRTC has no offsetof, but what its front end makes of one
#define FIELD_OFFSET(field) __INTADDR__(&(static_cast<Params*>(nullptr)->field))
#else
#define FIELD_OFFSET(field) __builtin_offsetof(Params, field)
#endif
static_assert(FIELD_OFFSET(q) == 0, "fagen packs another layout");
static_assert(FIELD_OFFSET(k) == 8, "fagen packs another layout");
static_assert(FIELD_OFFSET(v) == 16, "fagen packs another layout");
static_assert(FIELD_OFFSET(o) == 24, "fagen packs another layout");
static_assert(FIELD_OFFSET(lse) == 32, "fagen packs another layout");
static_assert(FIELD_OFFSET(q_strides) == 40, "fagen packs another layout");
static_assert(FIELD_OFFSET(k_strides) == 64, "fagen packs another layout");
static_assert(FIELD_OFFSET(v_strides) == 88, "fagen packs another layout");
static_assert(FIELD_OFFSET(o_strides) == 112, "fagen packs another layout");
static_assert(FIELD_OFFSET(scale_log2) == 136, "fagen packs another layout");
static_assert(FIELD_OFFSET(batch) == 140, "fagen packs another layout");
static_assert(FIELD_OFFSET(heads_q) == 144, "fagen packs another layout");
static_assert(FIELD_OFFSET(heads_kv) == 148, "fagen packs another layout");
static_assert(FIELD_OFFSET(seqlen_q) == 152, "fagen packs another layout");
static_assert(FIELD_OFFSET(seqlen_k) == 156, "fagen packs another layout");
static_assert(FIELD_OFFSET(heads_per_group) == 160, "fagen packs another layout");
static_assert(FIELD_OFFSET(tiles) == 164, "fagen packs another layout");
static_assert(sizeof(Params) == 168, "fagen packs another layout");
#undef FIELD_OFFSET

using QTile = SwizzledTile<Element, kBlockM, kChunk>;  // O passes through the same place
using KTile = SwizzledTile<Element, kBlockN, kChunk>;
using VTile = SwizzledTile<Element, kBlockN, kChunk>;
using PTile = SwizzledTile<Element, 64, 64>;

struct alignas(16) Work {  // a thread block's part of a tile; 16: moved at once
  Tile tile;          // the block's own rows
  BlockRange blocks;  // of keys, which the cluster walks through
};
constexpr int kNoMoreWork = -1;  // in place of the end of `blocks`

struct alignas(1024) SharedStorage {  // 1024: the period of the 128-byte swizzle
  Element q[kQStages][kBlockM * kQkColumns];
  Element k[kStages][kBlockN * kQkColumns];
  Element v[kStages][kBlockN * kVColumns];
  u64 q_full[kQStages][kSlices], q_empty[kQStages];
  u64 k_full[kStages][kSlices], k_empty[kStages];
  u64 v_full[kStages][1], v_empty[kStages];
  Work work[kQStages];  // whose Q it is: the producer tells the consumers
};

static_assert(sizeof(SharedStorage) == 197632, "fagen computed another size");
static_assert(kBlockM == 64 * kConsumerWarpgroups, "a consumer warpgroup computes 64 rows");
static_assert(kBlockN % 16 == 0 && kBlockN <= 256, "wgmma takes 16 keys a step, 256 columns at most");
static_assert(kBlockK % kChunk == 0 && kQkColumns % kBlockK == 0, "slices are whole chunks");
static_assert((kHeadDimQk + 15) / 16 % kQkSteps == 0, "whole statements");
static_assert(kBlockK / 16 % kQkSteps == 0, "a statement reads one slice");
static_assert(kVColumns <= kQkColumns, "O leaves through the place of Q");
static_assert(kBlockN / kCluster % 8 == 0, "a block's share of K is whole rows of the swizzle");
static_assert(kPersistent || (kQStages == 1 && !kDynamicTiles), "a block of one tile needs neither");
static_assert(kCluster == 1 || !kDynamicTiles, "the blocks of a cluster would draw apart");
static_assert(!kPingPong || kConsumerWarpgroups > 1, "turns need two warpgroups");

// Named barriers beside 0, which __syncthreads uses.
constexpr int kWarpgroupBarrier = 1;                    // + warpgroup: its 128 threads
constexpr int kTurnBarrier = 1 + kConsumerWarpgroups;  // + warpgroup: it and the one before it

// Blocks of keys that any of `rows` rows from `first_row` on sees.
DEVICE BlockRange blocks_of_rows(int first_row, int rows, const Params& params) {
  int end = BlockRange::begin;
  if (first_row < params.seqlen_q) {
    const int last_row = min(first_row + rows, params.seqlen_q) - 1;
    end = seen_blocks<kCausal, kBlockN>(last_row, params).end;
  }
  return {end};
}

DEVICE Work work_at(u32 index, const Params& params) {
  Tile tile = tile_at<kTileRows, kCausal, kHeadGrouping>(index, params);
  const BlockRange blocks = blocks_of_rows(tile.first_row, kTileRows, params);
  if (kCluster > 1) tile.first_row += blockIdx.x % kCluster * kBlockM;
  return {tile, blocks};
}

// ---- the producer: one thread, which keeps the rings full ----

DEVICE void produce(SharedStorage& shared, const TensorMap& q_map, const TensorMap& k_map,
                    const TensorMap& v_map, const Params& params, u32* tile_counter = nullptr) {
  const int q_heads_per_kv_head = params.heads_q / params.heads_kv;
  const Ring<kQStages, kSlices> q_ring{shared.q_full, shared.q_empty};
  const Ring<kStages, kSlices> k_ring{shared.k_full, shared.k_empty};
  const Ring<kStages, 1> v_ring{shared.v_full, shared.v_empty};
  RingPosition<kStages> kv_at;
  RingPosition<kQStages> q_at;
  auto wait_for_q_buffer = [&] { q_ring.acquire(q_at); };  // until an older tile's O has left it
  u32 wave = 0, index = tile_of_wave<kCluster, kBackAndForth>(0);
  while (index < params.tiles) {
    const Work work = work_at(index, params);
    const Tile& tile = work.tile;
    const int kv_head = tile.head / q_heads_per_kv_head;

    auto load_q = [&] {
      wait_for_q_buffer();
      if (kPersistent) shared.work[q_at.stage] = work;
#pragma unroll
      for (int column = 0; column < kQkColumns; column += kChunk) {
        const int slice = column / kBlockK;
        if (column % kBlockK == 0) q_ring.expect(q_at, slice, kQTileBytes / kSlices);
        load_chunk<QTile, 1>(shared.q[q_at.stage], &q_map, column, tile.first_row, tile.head,
                             tile.batch, &q_ring.full[q_at.stage][slice]);
      }
      q_at.advance();
    };
    auto load_k = [&](int block) {
      k_ring.acquire(kv_at);
#pragma unroll
      for (int column = 0; column < kQkColumns; column += kChunk) {
        const int slice = column / kBlockK;
        if (column % kBlockK == 0) k_ring.expect(kv_at, slice, kKTileBytes / kSlices);
        load_chunk<KTile, kCluster>(shared.k[kv_at.stage], &k_map, column, block * kBlockN, kv_head,
                                    tile.batch, &k_ring.full[kv_at.stage][slice]);
      }
    };
    auto load_v = [&](int block) {
      v_ring.acquire(kv_at);
      v_ring.expect(kv_at, 0, kVTileBytes);
#pragma unroll
      for (int column = 0; column < kVColumns; column += kChunk) {
        load_chunk<VTile, kCluster>(shared.v[kv_at.stage], &v_map, column, block * kBlockN, kv_head,
                                    tile.batch, v_ring.full[kv_at.stage]);
      }
    };

    // Q comes even where there is nothing to multiply: the consumers count on it. A lone buffer may
    // still hold the last O, so the first K goes ahead of it.
    if (kQStages > 1 || work.blocks.end == work.blocks.begin) load_q();
    for (int block = work.blocks.end - 1; block >= work.blocks.begin; --block) {
      load_k(block);
      if (kQStages == 1 && block == work.blocks.end - 1) load_q();
      load_v(block);
      kv_at.advance();
    }
    if (!kPersistent) break;
    index = kDynamicTiles ? draw_tile(tile_counter, params.tiles)
                          : tile_of_wave<kCluster, kBackAndForth>(++wave);
  }
  if (kCluster > 1) {  // stay until the other blocks have arrived at this one for the last time
    for (int stage = 0; stage < kStages; ++stage) {
      k_ring.acquire(kv_at);
      v_ring.acquire(kv_at);
      kv_at.advance();
    }
  }
  if (kPersistent) {  // in place of a Q, word that there is none
    wait_for_q_buffer();
    shared.work[q_at.stage].blocks.end = kNoMoreWork;
    mbarrier_arrive(&q_ring.full[q_at.stage][0]);
  }
}

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

// ---- the consumers: a warpgroup computes 64 rows of O ----

DEVICE void consume(SharedStorage& shared, const TensorMap& o_map, const Params& params) {
  // A value that is the same in all lanes, through a shuffle so that the compiler knows it: it
  // serialises wgmma under a branch that it believes to diverge.
  auto uniform = [](int value) { return __shfl_sync(0xffffffff, value, 0); };
  const int warpgroup = uniform(threadIdx.x / 128);
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int lane_row = warpgroup * 64 + warp * 16 + lane / 4;  // and lane_row + 8, within the tile
  const float scale_log2 = params.scale_log2;
  const Ring<kQStages, kSlices> q_ring{shared.q_full, shared.q_empty};
  const Ring<kStages, kSlices> k_ring{shared.k_full, shared.k_empty};
  const Ring<kStages, 1> v_ring{shared.v_full, shared.v_empty};
  RingPosition<kStages> k_at, v_at;
  RingPosition<kQStages> q_at;

  // Q and K lie with the product's depth (the head dim) contiguous, V with its width.
  const u64 q_descriptor = matrix_descriptor<kChunkBytes>(
      shared.q[0] + warpgroup * 64 * kChunk, 16, 8 * kChunkBytes);
  const u64 k_descriptor = matrix_descriptor<kChunkBytes>(shared.k[0], 16, 8 * kChunkBytes);
  const u64 v_descriptor =
      matrix_descriptor<kChunkBytes>(shared.v[0], kBlockN * kChunkBytes, 8 * kChunkBytes);

  auto sync_warpgroup = [&] { barrier_sync(kWarpgroupBarrier + warpgroup, 128); };
  // Lets the producer have the buffer that the last O leaves through, once it has left.
  u64* leaving = nullptr;
  auto free_q = [&] {
    if (leaving != nullptr && threadIdx.x % 128 == 0) {
      tma_store_wait_read();
      mbarrier_arrive(leaving);
    }
    leaving = nullptr;
  };
  auto wait_for_turn = [&] {
    if (kPingPong) barrier_sync(kTurnBarrier + warpgroup, 256);
  };
  auto pass_turn = [&] {
    if (kPingPong) barrier_arrive(kTurnBarrier + (warpgroup + 1) % kConsumerWarpgroups, 256);
  };
  if (warpgroup == kConsumerWarpgroups - 1) pass_turn();  // the first turn is warpgroup 0's

  // The next work. The producer of a persistent block sends it beside Q: to divide an index into a
  // tile here would delay the products.
  auto receive_work = [&] {
    if (!kPersistent) return work_at(tile_of_wave<kCluster, kBackAndForth>(0), params);
    q_ring.wait(q_at, 0);
    const Work& sent = shared.work[q_at.stage];
    return Work{uniform(sent.tile.first_row), uniform(sent.tile.head), uniform(sent.tile.batch),
                {uniform(sent.blocks.end)}};
  };

  while (true) {
    const Work work = receive_work();
    if (work.blocks.end == kNoMoreWork) break;
    const Tile& tile = work.tile;

    float o[kHeadDimV / 2];  // (64, kHeadDimV) of the warpgroup, see fragment.cuh
    float s[kBlockN / 2];   // (64, kBlockN): scores, then probabilities
    u32 p[kBlockN / 4];     // the probabilities as wgmma's A fragments, two to a register
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] = 0.0f;
    OnlineSoftmax<kLazyRescale, kExp2FmaEvery> softmax;
    float correction[2];

    const int row = tile.first_row + lane_row;
    const KeyRange visible[2] = {visible_keys<kCausal>(row, params),
                                 visible_keys<kCausal>(row + 8, params)};
    const int first_row = tile.first_row + warpgroup * 64;
    // What some row of the warpgroup sees, and what every row sees whole.
    const BlockRange seen = kSkipBlocks ? blocks_of_rows(first_row, 64, params) : work.blocks;
    const BlockRange whole = whole_blocks<kCausal, kBlockN>(first_row, params);

    // S = Q K^T, slice by slice as they arrive.
    auto multiply_qk = [&](bool first) {
      const u64 q_stage = q_descriptor + q_at.stage * (kQTileBytes >> 4);
      const u64 k_stage = k_descriptor + k_at.stage * (kKTileBytes >> 4);
#pragma unroll
      for (int column = 0; column < kHeadDimQk; column += 16 * kQkSteps) {
        if (column % kBlockK == 0) {
          if (first) q_ring.wait(q_at, column / kBlockK);
          k_ring.wait(k_at, column / kBlockK);
          if (column == 0) wait_for_turn();
          wgmma_fence();
        }
        u64 q[kQkSteps], k[kQkSteps];
#pragma unroll
        for (int i = 0; i < kQkSteps; ++i) {
          q[i] = q_stage + (QTile::offset(0, column + 16 * i) * sizeof(Element) >> 4);
          k[i] = k_stage + (KTile::offset(0, column + 16 * i) * sizeof(Element) >> 4);
        }
        wgmma_qk(s, q, k, column > 0);
      }
      wgmma_commit();
      if (kQStages > 1 && first) free_q();
    };

    // O += P V
    auto multiply_pv = [&] {
      const u64 v_stage = v_descriptor + v_at.stage * (kVTileBytes >> 4);
      v_ring.wait(v_at);
      wgmma_fence();
      u64 v[kBlockN / 16];
#pragma unroll
      for (int i = 0; i < kBlockN / 16; ++i) {
        v[i] = v_stage + (16 * i * kChunkBytes >> 4);
      }
      wgmma_pv(o, p, v, true);
      wgmma_commit();
    };

    // P in the element type, where the second product reads it.
    auto convert_p = [&] {
#pragma unroll
      for (int i = 0; i < kBlockN / 2; i += 2) p[i / 2] = pack<Element>(s[i], s[i + 1]);
    };

    auto scores_ready = [&] {
      pin_registers(s);
      k_ring.release<kCluster>(k_at, lane);
    };
    auto output_ready = [&] {
      pin_registers(o);
      v_ring.release<kCluster>(v_at, lane);
    };
    auto update_softmax = [&](auto masked, int block) {
      constexpr bool kMasked = decltype(masked)::value;
      if (kMasked && block >= whole.end) hide_keys(s, block * kBlockN, visible);
      softmax.template update<kMasked>(s, scale_log2, correction);
    };

    // One block of keys, one after the other within the warpgroup.
    auto step = [&](auto masked, int block) {
      multiply_qk(block == seen.end - 1);
      wgmma_wait<0>();
      pass_turn();
      scores_ready();
      update_softmax(masked, block);
      softmax.rescale(o, correction);
      convert_p();
      multiply_pv();
      wgmma_wait<0>();
      output_ready();
    };

    // The same, with the softmax of this block under the second product of the one before.
    auto overlapped_step = [&](auto masked, int block) {
      const bool first = masked.value && block == seen.end - 1;
      multiply_qk(first);
      if (first) {
        // An empty group in place of the product. Without the fence ptxas injects one (C7519).
        wgmma_fence();
        wgmma_commit();
      } else {
        multiply_pv();
      }
      pass_turn();
      wgmma_wait<1>();
      scores_ready();
      update_softmax(masked, block);
      wait_not_before(s[0] + s[1]);  // but before the others: much is to be done after it
      wgmma_wait<0>();
      if (!first) {
        output_ready();
        softmax.rescale(o, correction);
      }
      convert_p();
    };

    // Hands back a block that only other warpgroups see: in its turn, and not before it is there,
    // as its buffers are then loaded anew.
    auto skip_block = [&] {
      k_ring.wait(k_at);
      wait_for_turn();
      pass_turn();
      k_ring.release<kCluster>(k_at, lane);
      v_ring.wait(v_at);
      v_ring.release<kCluster>(v_at, lane);
    };

    // From the last block of keys to the first, so that the masked ones come first.
    int block = work.blocks.end - 1;
    for (; block >= seen.end; --block) skip_block();
    if (block >= seen.begin) {
      if constexpr (kOverlap) {
        // The first block goes with the masked ones, be it masked or not; of a full mask, alone.
        do {
          overlapped_step(Constant<true>(), block--);
        } while (kCausal && block >= whole.end);
        while (block >= seen.begin) overlapped_step(Constant<false>(), block--);
        multiply_pv();
        wgmma_wait<0>();
        output_ready();
      } else {
        while (block >= whole.end) step(Constant<true>(), block--);
        while (block >= seen.begin) step(Constant<false>(), block--);
      }
    } else {
      // No key, but Q was loaded: its arrival must be seen before its place is reused.
      q_ring.wait(q_at);
      if (kQStages > 1) free_q();
    }

    float inverse_sum[2], lse[2];
    softmax.finish(scale_log2, inverse_sum, lse);
    if (params.lse != nullptr && lane % 4 == 0) {
      const long long head = static_cast<long long>(tile.batch) * params.heads_q + tile.head;
      float* const lse_rows = params.lse + head * params.seqlen_q;  // (seqlen_q)
      if (row < params.seqlen_q) lse_rows[row] = lse[0];
      if (row + 8 < params.seqlen_q) lse_rows[row + 8] = lse[1];
    }

    // O goes out by TMA from this warpgroup's rows of Q, which nobody reads any more.
    Element* const staged = shared.q[q_at.stage];
    // The place that this lane names to stmatrix.
    const int matrix_row = warpgroup * 64 + warp * 16 + lane % 16, matrix_column = lane / 16 * 8;
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; i += 8) {  // 16 columns
      u32 matrices[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int j = i + 2 * m;  // the head dim may end amid these
        const float inverse = inverse_sum[fragment_row(j)];
        matrices[m] = j < kHeadDimV / 2 ? pack<Element>(o[j] * inverse, o[j + 1] * inverse) : 0;
      }
      store_matrix_x4(staged + QTile::offset(matrix_row, 2 * i + matrix_column), matrices);
    }
    fence_proxy_async();
    sync_warpgroup();  // one thread stores what all four warps wrote
    if (threadIdx.x % 128 == 0) {
#pragma unroll
      for (int column = 0; column < kHeadDimV; column += kChunk) {
        tma_store(&o_map, staged + QTile::offset(warpgroup * 64, column), column, first_row,
                  tile.head, tile.batch);
      }
      tma_store_commit();
    }
    leaving = &shared.q_empty[q_at.stage];
    if (kQStages == 1) free_q();
    if (!kPersistent) break;
    q_at.advance();
  }

  if (kQStages > 1) free_q();  // a block's shared memory must outlive TMA's reads of it
  // The last turn that was passed on is still to be taken.
  if (warpgroup == 0) wait_for_turn();
}

extern "C" __global__ void
    __launch_bounds__(kThreads, kMinBlocksPerSm)
    fagen_forward_bf16_d256_full(
        const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
        const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap o_map,
        const __grid_constant__ Params params, u32* tile_counter) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

  if (threadIdx.x == kConsumerThreads) {
    tma_prefetch(&q_map);
    tma_prefetch(&k_map);
    tma_prefetch(&v_map);
    const Ring<kQStages, kSlices> q_ring{shared.q_full, shared.q_empty};
    const Ring<kStages, kSlices> k_ring{shared.k_full, shared.k_empty};
    const Ring<kStages, 1> v_ring{shared.v_full, shared.v_empty};
    for (int stage = 0; stage < kQStages; ++stage) q_ring.init(stage, kConsumerWarpgroups);
    for (int stage = 0; stage < kStages; ++stage) {
      k_ring.init(stage, kCluster * kConsumerWarpgroups * 4);
      v_ring.init(stage, kCluster * kConsumerWarpgroups * 4);
    }
    mbarrier_init_fence();
  }
  // The barriers exist before anyone waits or arrives.
  kCluster == 1 ? __syncthreads() : cluster_sync();

  if constexpr (!kHasWgmma) {
    __trap();
  } else if (threadIdx.x >= kConsumerThreads) {
    if constexpr (kProducerRegisters > 0) give_up_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) {
      produce(shared, q_map, k_map, v_map, params, tile_counter);
    }
  } else {
    if constexpr (kProducerRegisters > 0) take_registers<kConsumerRegisters>();
    consume(shared, o_map, params);
  }
}

#undef DEVICE
}  // namespace fagen_forward_bf16_d256_full
