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
#pragma once
#include "fragment.cuh"
#include "ptx_sm80.cuh"
#include "swizzle.cuh"

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
