// What the host passes to every forward kernel; params_layout.cuh checks that it packs the same.
#pragma once

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
