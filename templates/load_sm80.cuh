// Tiles from global to shared memory by cp.async, in units of 8 elements (16 bytes).
#pragma once
#include "params.cuh"
#include "ptx_sm80.cuh"
#include "swizzle.cuh"

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
