// Forward attention for sm80:
// fp16, head dim 40, full mask.
// Written by fagen.
#ifndef forward_fp16_d40_full_narrow_sm80_h
#define forward_fp16_d40_full_narrow_sm80_h

#include <cuda_runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

// O = softmax(softmax_scale * Q K^T + mask) V
//
// q, o                (batch, seqlen_q, heads_q, 40) fp16, in device memory
// k, v                (batch, seqlen_k, heads_kv, 40) fp16;
//                     heads_q is a multiple of heads_kv, lengths are at most 1073741823
// lse                 (batch, heads_q, seqlen_q) float, natural log of the sums; NULL if not wanted
// q_strides, ...      of (batch, row, head) in elements; the head dim is contiguous.
//                     Bases and strides are multiples of 2 bytes,
//                     and no stride of o is 0
// softmax_scale       usually 1 / sqrt(40); 0 to 1e+30
// stream              of the current device; the launch is asynchronous
//
// Lengths may be 0. A row that sees no key gives O = 0 and LSE = -infinity. Returns
// cudaErrorInvalidValue for arguments that break a rule above, or what the launch returned.
cudaError_t forward_fp16_d40_full_narrow_sm80_launch(
    const void* q, const void* k, const void* v, void* o, float* lse, int batch, int heads_q,
    int heads_kv, int seqlen_q, int seqlen_k, const long long q_strides[3],
    const long long k_strides[3], const long long v_strides[3], const long long o_strides[3],
    float softmax_scale, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif  // forward_fp16_d40_full_narrow_sm80_h
