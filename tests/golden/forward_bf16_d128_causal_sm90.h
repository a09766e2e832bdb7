// Forward attention for sm90:
// bf16, head dim 128, causal mask.
// Written by fagen.
#ifndef forward_bf16_d128_causal_sm90_h
#define forward_bf16_d128_causal_sm90_h

#include <cuda_runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

// O = softmax(softmax_scale * Q K^T + mask) V
//
// q, o                (batch, seqlen_q, heads_q, 128) bf16, in device memory
// k, v                (batch, seqlen_k, heads_kv, 128) bf16;
//                     heads_q is a multiple of heads_kv, lengths are at most 1073741823
// lse                 (batch, heads_q, seqlen_q) float, natural log of the sums; NULL if not wanted
// q_strides, ...      of (batch, row, head) in elements; the head dim is contiguous.
//                     Bases and strides are multiples of 16 bytes,
//                     strides at least 0 and below 2^40 bytes,
//                     and no stride of o is 0
// softmax_scale       usually 1 / sqrt(128); 0 to 1e+30
// stream              of the current device; the launch is asynchronous
//
// Query i sees keys up to i + seqlen_k - seqlen_q.
//
// Lengths may be 0. A row that sees no key gives O = 0 and LSE = -infinity. Returns
// cudaErrorInvalidValue for arguments that break a rule above, or what the launch returned.
cudaError_t forward_bf16_d128_causal_sm90_launch(
    const void* q, const void* k, const void* v, void* o, float* lse, int batch, int heads_q,
    int heads_kv, int seqlen_q, int seqlen_k, const long long q_strides[3],
    const long long k_strides[3], const long long v_strides[3], const long long o_strides[3],
    float softmax_scale, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif  // forward_bf16_d128_causal_sm90_h
