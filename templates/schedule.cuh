// Who gives a thread block its tiles, where a block has more than one.
#pragma once
#include "ptx.cuh"

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
