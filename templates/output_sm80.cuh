// O and LSE of a warp's rows to global memory, O through shared memory.
#pragma once
#include "fragment.cuh"
#include "load_sm80.cuh"

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
