// How a tile of 16-bit elements lies in shared memory: chunks of kChunk columns one after the
// other, the rows of a chunk one after the other, and in a row its 16-byte units exchanged
// (XOR-swizzled) as TMA and wgmma expect it, so that eight rows of a column unit lie in
// different banks.
#pragma once
#include "ptx.cuh"

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
