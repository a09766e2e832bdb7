// How a warp holds an accumulator, whichever instruction computes it: of 16 rows, lane t has the
// rows t/4 and t/4 + 8, and of each 8 columns the columns 2*(t%4) and 2*(t%4) + 1. Element i is in
// row t/4 + 8 * fragment_row(i) and column 2 * (t%4) + fragment_column(i).
#pragma once
#include "ptx.cuh"

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
