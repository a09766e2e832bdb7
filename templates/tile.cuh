// Which rows of which head a tile index means.
#pragma once
#include "params.cuh"

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
