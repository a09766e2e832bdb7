// Which keys a query sees. Everything in a kernel that asks so asks here.
#pragma once
#include "fragment.cuh"

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
