// forward_fp16_d40_full_narrow_sm80.cu, written by fagen VERSION for sm80.
//
//   config  forward_sm80 128x64x48 stages=1 min_blocks_per_sm=1 exp2_fma_every=0 head_grouping warps=4
//   tuned   default config, not tuned
//   launch  128 threads, 24576 bytes of dynamic shared memory; forward_fp16_d40_full_narrow_sm80_host.cu does it
//   build   nvcc -std=c++17 -arch=sm_80 -c forward_fp16_d40_full_narrow_sm80.cu

// fagen_forward_fp16_d40_full_narrow:
// forward attention, fp16, head dim 40, full mask.
//
// O = softmax(softmax_scale * Q K^T + mask) V for Ampere and every later architecture, after
// FlashAttention-2: each warp computes its own rows of Q with mma.sync, K and V come through rings
// of shared-memory buffers that cp.async fills while the tensor cores work on earlier blocks.
//
// Written by fagen from forward_sm80.cu.j2 with the config
//   forward_sm80 128x64x48 stages=1 min_blocks_per_sm=1 exp2_fma_every=0 head_grouping warps=4

namespace fagen_forward_fp16_d40_full_narrow {

// Instructions that came with Ampere, one per function: cp.async, ldmatrix, mma.sync.
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

using Element = Half;

constexpr int kHeadDimQk = 40;  // columns of Q and K
constexpr int kHeadDimV = 40;  // columns of V and O
constexpr bool kCausal = false;  // query i sees keys up to i + seqlen_k - seqlen_q
constexpr int kAlignment = 2;  // bytes that bases and strides are multiples of
constexpr int kBlockM = 128;  // rows of Q per thread block
constexpr int kBlockN = 64;  // keys per step
constexpr int kBlockK = 48;  // columns of Q and K that one group of copies carries
constexpr int kWarps = 4;  // the rows of the thread block are split among them
constexpr int kStages = 1;  // depth of the K ring and of the V ring
constexpr int kMinBlocksPerSm = 1;
constexpr int kThreads = 128;
constexpr bool kQInRegisters = false;  // Q stays there, the rings take its place
constexpr bool kLazyRescale = false;  // rescale O only when a maximum grew much
constexpr int kExp2FmaEvery = 0;  // see softmax.cuh; 0: no exponential on the FMA pipe
constexpr bool kHeadGrouping = true;  // tiles of several heads interleaved

// Columns of a tile in shared memory; those past the head dim are zeros.
constexpr int kQkColumns = 48;
constexpr int kVColumns = 48;
constexpr int kChunk = 16;  // columns side by side in shared memory: one swizzle span
constexpr int kSlices = kQkColumns / kBlockK;
constexpr int kWarpRows = kBlockM / kWarps;
constexpr int kRowTiles = kWarpRows / 16;  // of a warp, 16 rows of Q each
constexpr int kQkTiles = (kHeadDimQk + 15) / 16;  // 16 columns each; the last may be half one
constexpr int kQTiles = kQInRegisters ? kQkTiles : 2;  // of Q, in registers at a time

constexpr int kQElements = kBlockM * kQkColumns;
constexpr int kKElements = kBlockN * kQkColumns;
constexpr int kVElements = kBlockN * kVColumns;
constexpr int kRingElements = kStages * (kKElements + kVElements);
constexpr int kLarger = kQElements > kRingElements ? kQElements : kRingElements;
constexpr int kSmemElements = kQInRegisters ? kLarger : kQElements + kRingElements;

static_assert(kSmemElements * sizeof(Element) == 24576, "fagen computed another size");
static_assert(kThreads == 32 * kWarps, "fagen computed other threads");
static_assert(kBlockM == 16 * kRowTiles * kWarps, "a warp computes tiles of 16 rows");
static_assert(kBlockN % 16 == 0, "mma.sync takes 16 keys of V a step");
static_assert(kBlockK % kChunk == 0 && kQkColumns % kBlockK == 0, "slices are whole chunks");
static_assert(kVColumns <= kQkColumns, "O leaves through the place of Q");

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
// Tiles from global to shared memory by cp.async, in units of 8 elements (16 bytes).
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

DEVICE constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

template <typename T>
DEVICE T* element_at(T* base, const Strides& strides, int batch, int row, int head) {
  return base + batch * strides.batch + row * strides.row + head * strides.head;
}

// Calls visit(unit, row, column, exists) for this thread's units of a (kRows, kColumns) tile in
// global memory that kTeam threads share and of which `rows` rows exist. Neighbours take
// neighbouring units, and a thread keeps to its columns, so that one pointer walks down the rows.
template <int kRows, int kColumns, int kTeam, typename T, typename Visit>
DEVICE void for_each_unit(T* tile, long long row_stride, int rows, Visit visit) {
  constexpr int kUnits = kColumns / 8;
  constexpr int kLanes = common_divisor(kUnits, kTeam);  // threads side by side in a row
  constexpr int kRowsPerPass = kTeam / kLanes;
  const int first_row = threadIdx.x % kTeam / kLanes, first_column = 8 * (threadIdx.x % kLanes);
  const int own_rows = rows - first_row;
  T* own = tile + first_row * row_stride + first_column;
#pragma unroll
  for (int row = 0; row < kRows; row += kRowsPerPass) {
    if (row + kRowsPerPass > kRows && row + first_row >= kRows) return;
#pragma unroll
    for (int unit = 0; unit < kUnits; unit += kLanes) {
      visit(own + 8 * unit, row + first_row, 8 * unit + first_column, row < own_rows);
    }
    own += kRowsPerPass * row_stride;
  }
}

// Starts a copy to shared memory; zeros where there is no such unit, since 0 * NaN is NaN.
// kAlignment: bytes that bases and strides in global memory are multiples of.
template <int kAlignment, typename Element>
DEVICE void load_unit(Element* shared, const Element* global, bool exists) {
  if constexpr (kAlignment == 16) {
    copy_async_16(shared, global, exists ? 16 : 0);
  } else {
    const u16* const bits = reinterpret_cast<const u16*>(global);
    u32 pairs[4] = {};
    if (exists) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = bits[2 * i] | static_cast<u32>(bits[2 * i + 1]) << 16;
    }
    *reinterpret_cast<uint4*>(shared) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// Starts the copy of kColumns columns from `first_column` of a tile, by kThreads threads. Rows at or
// past `rows` and columns at or past kWidth become zeros. kWhole: all rows exist.
template <typename Tile, int kColumns, int kWidth, bool kWhole, int kThreads, int kAlignment>
DEVICE void load_tile(typename Tile::Element* tile, const typename Tile::Element* global,
                      long long row_stride, int rows, int first_column) {
  auto load = [&](const typename Tile::Element* unit, int row, int column, bool row_exists) {
    column += first_column;
    const bool column_exists = kWidth % kColumns == 0 || column < kWidth;
    load_unit<kAlignment>(tile + Tile::template offset<u32>(row, column), unit,
                          column_exists && (kWhole || row_exists));
  };
  for_each_unit<Tile::kRows, kColumns, kThreads>(global + first_column, row_stride, rows, load);
}
// The two products of a warp with mma.sync: S += A B^T and O += P B.
//
// Operands come from shared memory in fragments of 16 x 16 elements: four 8 x 8 matrices, and
// ldmatrix gives a lane one register of each. A fragment of Q (rows x depth) is mma.sync's A
// operand, its matrices in the order of columns. So are those of V (keys x columns, transposed on
// the way); those of K (keys x depth) are in the order of rows. Then registers 0 and 1 are the B
// operand of the first 8 columns of V or keys of K, and 2 and 3 that of the other 8.
//
// A lane gives the address of one row of one matrix. It is computed once per operand, for the first
// fragment; SwizzledTile::moved leads from there to any other.

using Fragment = u32[4];

constexpr int kAhead = 4;  // fragments of B in registers at a time: loaded while others are used

// One column tile of A, for each of the warp's row tiles.
template <typename Tile, int kRowTiles>
DEVICE void load_fragments(Fragment (&a)[kRowTiles], u32 address, int column) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
    load_matrix_x4(a[tile], Tile::moved(address, 16 * tile, column));
  }
}

// S += A B^T over the column tiles [kFirst, kEnd) of the depth. `a` holds kHeld column tiles: all of
// them already, or, if kLoadA, this one and the next.
template <typename ATile, typename BTile, int kFirst, int kEnd, bool kLoadA, int kHeld,
          int kRowTiles, int kCount>
DEVICE void multiply_transposed(float (&s)[kRowTiles][kCount], Fragment (&a)[kHeld][kRowTiles],
                                u32 a_address, u32 b_address) {
  constexpr int kWidthTiles = kCount / 8;
  constexpr int kFragments = (kEnd - kFirst) * kWidthTiles;
  Fragment b[kAhead];
  auto load_b = [&](int i) {  // fragment i: width first, then depth
    if (i >= kFragments) return;
    const int row = 16 * (i % kWidthTiles), column = 16 * (kFirst + i / kWidthTiles);
    load_matrix_x4(b[i % kAhead], BTile::moved(b_address, row, column));
  };

  if (kLoadA) load_fragments<ATile>(a[kFirst % kHeld], a_address, 16 * kFirst);
#pragma unroll
  for (int i = 0; i < kAhead - 1; ++i) load_b(i);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const int column_tile = kFirst + i / kWidthTiles, width_tile = i % kWidthTiles;
    if (kLoadA && width_tile == 0 && column_tile + 1 < kEnd) {
      load_fragments<ATile>(a[(column_tile + 1) % kHeld], a_address, 16 * (column_tile + 1));
    }
    load_b(i + kAhead - 1);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const Fragment& left = a[column_tile % kHeld][tile];
      const Fragment& right = b[i % kAhead];
      mma_m16n8k16<typename BTile::Element>(&s[tile][8 * width_tile], left, right[0], right[1]);
      mma_m16n8k16<typename BTile::Element>(&s[tile][8 * width_tile + 4], left, right[2], right[3]);
    }
  }
}

// O += P B. P's accumulators lie as mma.sync's A operand does, once they are 16 bits wide: P never
// touches shared memory.
template <typename BTile, int kRowTiles, int kCount, int kDepth>
DEVICE void multiply(float (&o)[kRowTiles][kCount], const float (&p)[kRowTiles][kDepth],
                     u32 b_address) {
  using Element = typename BTile::Element;
  constexpr int kWidth = 2 * kCount;
  constexpr int kWidthTiles = (kWidth + 15) / 16;  // the last may be half one
  constexpr int kFragments = kDepth / 8 * kWidthTiles;
  Fragment b[kAhead];
  auto load_b = [&](int i) {  // fragment i: width first, then depth
    if (i >= kFragments) return;
    const int row = 16 * (i / kWidthTiles), column = 16 * (i % kWidthTiles);
    load_matrix_x4_transposed(b[i % kAhead], BTile::moved(b_address, row, column));
  };

#pragma unroll
  for (int i = 0; i < kAhead - 1; ++i) load_b(i);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const int depth_tile = i / kWidthTiles, width_tile = i % kWidthTiles;
    if (width_tile == 0) __syncwarp();  // else the assembler loads so far ahead that it spills
    load_b(i + kAhead - 1);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const float* const q = &p[tile][8 * depth_tile];
      const Fragment left = {pack<Element>(q[0], q[1]), pack<Element>(q[2], q[3]),
                             pack<Element>(q[4], q[5]), pack<Element>(q[6], q[7])};
      const Fragment& right = b[i % kAhead];
      mma_m16n8k16<Element>(&o[tile][8 * width_tile], left, right[0], right[1]);
      if (16 * width_tile + 8 < kWidth) {
        mma_m16n8k16<Element>(&o[tile][8 * width_tile + 4], left, right[2], right[3]);
      }
    }
  }
}
// O and LSE of a warp's rows to global memory, O through shared memory.

// Puts 16 rows of O into shared memory. `row` is the first of the lane's two.
template <typename Tile, int kCount>
DEVICE void stage_output(typename Tile::Element* tile, const float (&o)[kCount], int row,
                         const float (&inverse_sum)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int half = fragment_row(i);
    const int column = 8 * (i / 4) + 2 * (threadIdx.x % 4);
    *reinterpret_cast<u32*>(tile + Tile::template offset<u32>(row + 8 * half, column)) =
        pack<typename Tile::Element>(o[i] * inverse_sum[half], o[i + 1] * inverse_sum[half]);
  }
}

template <int kAlignment, typename Element>
DEVICE void store_unit(Element* global, const Element* shared) {
  const uint4 unit = *reinterpret_cast<const uint4*>(shared);
  if constexpr (kAlignment == 16) {
    *reinterpret_cast<uint4*>(global) = unit;
  } else {
    u16* const bits = reinterpret_cast<u16*>(global);
    const u32 pairs[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = static_cast<u16>(pairs[i / 2] >> 16 * (i % 2));
  }
}

// A warp's (kRows, kWidth) of a tile, of which `rows` rows exist, from shared to global memory.
template <typename Tile, int kRows, int kWidth, int kAlignment>
DEVICE void store_output(typename Tile::Element* global, long long row_stride, int rows,
                         const typename Tile::Element* tile, int first_row) {
  auto store = [&](typename Tile::Element* unit, int row, int column, bool exists) {
    if (exists) store_unit<kAlignment>(unit, tile + Tile::template offset<u32>(first_row + row, column));
  };
  for_each_unit<kRows, kWidth, 32>(global, row_stride, rows, store);
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

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls visit(Constant<0>()) to visit(Constant<kCount - 1>()).
template <int kCount, int kIndex = 0, typename Visit>
DEVICE void for_each_constant(Visit visit) {
  if constexpr (kIndex < kCount) {
    visit(Constant<kIndex>());
    for_each_constant<kCount, kIndex + 1>(visit);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocksPerSm)
    fagen_forward_fp16_d40_full_narrow(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  Element* const q_tile = reinterpret_cast<Element*>(shared_bytes);   // (kBlockM, kQkColumns)
  Element* const k_ring = q_tile + (kQInRegisters ? 0 : kQElements);  // kStages of (kBlockN, ...)
  Element* const v_ring = k_ring + kStages * kKElements;              // the same

  const Tile tile = tile_at<kBlockM, kCausal, kHeadGrouping>(blockIdx.x, params);
  const int head_kv = tile.head / (params.heads_q / params.heads_kv);
  const int rows = min(kBlockM, params.seqlen_q - tile.first_row);  // of the tile that exist
  const Element* const q =  // (rows, kHeadDimQk)
      element_at(params.q, params.q_strides, tile.batch, tile.first_row, tile.head);
  const Element* const k =  // (seqlen_k, kHeadDimQk)
      element_at(params.k, params.k_strides, tile.batch, 0, head_kv);
  const Element* const v =  // (seqlen_k, kHeadDimV)
      element_at(params.v, params.v_strides, tile.batch, 0, head_kv);

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * kWarpRows;  // the warp's first row in the tile
  const int lane_row = warp_row + lane / 4;  // the lane's first; others are 8 and 16 * i below
  // Of the first fragments, as products_sm80.cuh says.
  const u32 q_address =
      shared_address(q_tile + QTile::offset<u32>(warp_row + lane % 16, lane / 16 * 8));
  const u32 k_address =
      shared_address(k_ring + KTile::offset<u32>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8));
  const u32 v_address = shared_address(v_ring + VTile::offset<u32>(lane % 16, lane / 16 * 8));

  // Blocks of keys that any row sees, and those of them that every row sees whole.
  const BlockRange blocks = seen_blocks<kCausal, kBlockN>(tile.first_row + rows - 1, params);
  const BlockRange whole = whole_blocks<kCausal, kBlockN>(tile.first_row, params);

  auto load_q_slice = [&](int slice) {
    load_tile<QTile, kBlockK, kHeadDimQk, false, kThreads, kAlignment>(
        q_tile, q, params.q_strides.row, rows, slice * kBlockK);
  };
  // A slice of a block of K, and a block of V. Only the last block, which comes first, may have
  // keys past seqlen_k: the others are `whole`.
  auto load_k_slice = [&](auto whole, int block, int stage, int slice) {
    load_tile<KTile, kBlockK, kHeadDimQk, decltype(whole)::value, kThreads, kAlignment>(
        k_ring + stage * kKElements, k + block * kBlockN * params.k_strides.row,
        params.k_strides.row, params.seqlen_k - block * kBlockN, slice * kBlockK);
  };
  auto load_v = [&](auto whole, int block, int stage) {
    load_tile<VTile, kVColumns, kHeadDimV, decltype(whole)::value, kThreads, kAlignment>(
        v_ring + stage * kVElements, v + block * kBlockN * params.v_strides.row,
        params.v_strides.row, params.seqlen_k - block * kBlockN, 0);
  };
  // With more than one stage: a block after the first, its K and V in one group of copies. There is
  // a group even if there is no such block, since waiting means counting groups.
  auto load_block = [&](int block, int stage) {
    if (block >= blocks.begin) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        load_k_slice(Constant<true>(), block, stage, slice);
      }
      load_v(Constant<true>(), block, stage);
    }
    copy_async_commit();
  };

  float o[kRowTiles][kHeadDimV / 2] = {};  // the warp's (kWarpRows, kHeadDimV), see fragment.cuh
  OnlineSoftmax<kLazyRescale, kExp2FmaEvery> softmax[kRowTiles];
  Fragment q_fragments[kQTiles][kRowTiles];
  int stage = 0;  // of the rings, where the block of this step lies

  auto step = [&](int block) {
    const bool first = block == blocks.end - 1;
    const u32 k_bytes = stage * kKElements * sizeof(Element);
    const u32 v_bytes = stage * kVElements * sizeof(Element);
    float s[kRowTiles][kBlockN / 2] = {};  // (kWarpRows, kBlockN): scores, then probabilities

    if constexpr (kStages > 1) {
      if (!first) {
        copy_async_wait<kStages - 2>();  // groups of the blocks after this one
        __syncthreads();  // this block is there for all warps, and all are done with the one before
        load_block(block - (kStages - 1), stage == 0 ? kStages - 1 : stage - 1);
      }
    }

    // S = Q K^T
    for_each_constant<kSlices>([&](auto slice) {
      constexpr int kSlice = decltype(slice)::value;
      if (kStages == 1 || first) {
        // Groups begun after this slice's: the later slices, V and the blocks after this one; with
        // one stage only V, which begins under the first slice.
        constexpr int kNewer = kSlices - 1 - kSlice + (kStages > 1 ? kStages : kSlice > 0);
        copy_async_wait<kNewer>();
        __syncthreads();  // the slice is there for all warps, and all are done with V before it
      }
      if (kStages == 1 && kSlice == 0) {
        if (first) {
          load_v(Constant<false>(), block, stage);
        } else {
          load_v(Constant<true>(), block, stage);
        }
        copy_async_commit();
      }
      constexpr int kFirst = kSlice * kBlockK / 16;  // column tiles
      constexpr int kEnd = kSlice + 1 == kSlices ? kQkTiles : kFirst + kBlockK / 16;
      multiply_transposed<QTile, KTile, kFirst, kEnd, !kQInRegisters>(s, q_fragments, q_address,
                                                                      k_address + k_bytes);
    });

    if (kStages == 1) {
      copy_async_wait<0>();
      __syncthreads();  // V is there for all warps, and all are done with K
      if (block > blocks.begin) {
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          load_k_slice(Constant<true>(), block - 1, stage, slice);
          copy_async_commit();
        }
      }
    } else if (first) {
      copy_async_wait<kStages - 1>();
      __syncthreads();  // V is there for all warps
    }

    const bool masked = block >= whole.end;
    if (masked) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        const int row = tile.first_row + lane_row + 16 * i;
        const KeyRange visible[2] = {visible_keys<kCausal>(row, params),
                                     visible_keys<kCausal>(row + 8, params)};
        hide_keys(s[i], block * kBlockN, visible);
      }
    }

#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float correction[2];
      if (kExp2FmaEvery > 0 && !masked) {
        softmax[i].template update<false>(s[i], params.scale_log2, correction);
      } else {  // right for unmasked blocks too, and one copy of the code where it is enough
        softmax[i].template update<true>(s[i], params.scale_log2, correction);
      }
      softmax[i].rescale(o[i], correction);
    }

    // O += P V
    multiply<VTile>(o, s, v_address + v_bytes);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  };

  // From the last block of keys to the first, so that the masked ones come first.
  if (blocks.end > blocks.begin) {
    int block = blocks.end - 1;
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) load_q_slice(slice);
      copy_async_commit();
      copy_async_wait<0>();
      __syncthreads();  // Q is there for all warps
#pragma unroll
      for (int i = 0; i < kQkTiles; ++i) load_fragments<QTile>(q_fragments[i], q_address, 16 * i);
      __syncthreads();  // all warps have their fragments: the rings may take Q's place
    }
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if constexpr (!kQInRegisters) load_q_slice(slice);
      load_k_slice(Constant<false>(), block, 0, slice);
      copy_async_commit();
    }
    if constexpr (kStages > 1) {
      load_v(Constant<false>(), block, 0);
      copy_async_commit();
#pragma unroll
      for (int i = 1; i < kStages; ++i) load_block(block - i, i);
    }

    for (; block >= blocks.begin; --block) step(block);
    if (kQInRegisters) __syncthreads();  // all warps are done with the rings: O takes their place
  }

  // Each warp writes its own rows, through its own rows of Q's place.
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const int row = lane_row + 16 * i;
    float inverse_sum[2], lse[2];
    softmax[i].finish(params.scale_log2, inverse_sum, lse);
    stage_output<QTile>(q_tile, o[i], row, inverse_sum);
    if (params.lse != nullptr && lane % 4 == 0) {
      const long long head = static_cast<long long>(tile.batch) * params.heads_q + tile.head;
      float* const lse_rows = params.lse + head * params.seqlen_q + tile.first_row;  // (rows)
      if (row < rows) lse_rows[row] = lse[0];
      if (row + 8 < rows) lse_rows[row + 8] = lse[1];
    }
  }
  __syncwarp();  // a lane stores what other lanes of its warp wrote
  store_output<QTile, kWarpRows, kHeadDimV, kAlignment>(
      element_at(params.o, params.o_strides, tile.batch, tile.first_row + warp_row, tile.head),
      params.o_strides.row, rows - warp_row, q_tile, warp_row);
}

#undef DEVICE
}  // namespace fagen_forward_fp16_d40_full_narrow
