// Tiles from global to shared memory by TMA.
#pragma once
#include "ring_sm90.cuh"
#include "swizzle.cuh"

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
