// Online softmax over the rows of an accumulator fragment (FlashAttention, algorithm 1).
#pragma once
#include "fragment.cuh"

// exp2(x) on the FMA pipe: 2**integer * polynomial(fraction), fraction in [-1/2, 1/2]. The cubic
// minimises the largest relative error, 1e-4 (less than half an ulp of bf16). x <= 0.
DEVICE float exp2_polynomial(float x) {
  constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2**23
  x = fmaxf(x, -126.0f);
  const float shifted = x + kRoundToInteger;
  const float fraction = x - (shifted - kRoundToInteger);
  float p = fmaf(fraction, 0.0559229f, 0.2426131f);
  p = fmaf(fraction, p, 0.6931200f);
  p = fmaf(fraction, p, 0.99992522f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
}

// The running maximum and sum of a lane's two rows. Sums are the lane's own until `finish`.
template <bool kLazyRescale, int kExp2FmaEvery>
struct OnlineSoftmax {
  static constexpr float kLazyThreshold = 8.0f;  // log2 of how far P may exceed 1

  float maximum[2] = {-infinity(), -infinity()};
  float sum[2] = {0.0f, 0.0f};

  // Turns scores into exp2(scale_log2 * (score - maximum)) in place, and gives the factors that
  // what was accumulated before must be multiplied by. kMasked: scores may be -infinity, even all
  // of a row so far.
  template <bool kMasked, int kCount>
  DEVICE void update(float (&scores)[kCount], float scale_log2, float (&correction)[2]) {
    // Row after row: the first's exponentials need not wait for the second's maximum.
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float highest = maximum[row];
#pragma unroll
      for (int i = 2 * row; i < kCount; i += 4) {
        highest = fmaxf(highest, fmaxf(scores[i], scores[i + 1]));
      }
      highest = row_maximum(highest);
      if (kLazyRescale && (highest - maximum[row]) * scale_log2 <= kLazyThreshold) {
        highest = maximum[row];
      }
      float offset = highest * scale_log2;
      if (kMasked && highest == -infinity()) offset = 0.0f;  // -inf - -inf would be NaN
      correction[row] = exp2_approx(fmaf(maximum[row], scale_log2, -offset));
      maximum[row] = highest;
      sum[row] *= correction[row];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (fragment_row(i) != row) continue;
        const float x = fmaf(scores[i], scale_log2, -offset);
        // The polynomial has no exact 0 for the -infinity of a masked score.
        const bool on_fma_pipe =
            !kMasked && kExp2FmaEvery > 0 && i / 4 % max(kExp2FmaEvery, 1) == 0;
        scores[i] = on_fma_pipe ? exp2_polynomial(x) : exp2_approx(x);
        sum[row] += scores[i];
      }
    }
  }

  // Multiplies an output fragment by the factors of `update`; with kLazyRescale only if any row
  // of the warp needs it.
  template <int kCount>
  DEVICE static void rescale(float (&output)[kCount], const float (&correction)[2]) {
    if (kLazyRescale &&
        !__any_sync(0xffffffff, correction[0] != 1.0f || correction[1] != 1.0f)) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) output[i] *= correction[fragment_row(i)];
  }

  // After the last update: whole sums, and the natural logarithm of the sum of exponentials.
  DEVICE void finish(float scale_log2, float (&inverse_sum)[2], float (&lse)[2]) {
    constexpr float kLn2 = 0.693147180559945f;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float total = row_total(sum[row]);
      inverse_sum[row] = total == 0.0f ? 0.0f : __frcp_rn(total);  // a row without keys gives 0
      lse[row] = total == 0.0f ? -infinity() : (maximum[row] * scale_log2 + __log2f(total)) * kLn2;
    }
  }
};
