// The host side of forward_bf16_d128_causal_sm90.cu: forward_bf16_d128_causal_sm90_launch,
// which forward_bf16_d128_causal_sm90.h declares and explains.
//
// Written by fagen from emit_host.cu.j2. Add this one file to a build: it includes the kernel.
//   nvcc -std=c++17 -arch=sm_90a -c forward_bf16_d128_causal_sm90_host.cu

#include "forward_bf16_d128_causal_sm90.h"  // the launcher's declaration

#include <climits>
#include <cmath>
#include <cstdint>

#include <cudaTypedefs.h>

// The kernel under a name of its own, so that many emitted kernels link into one program.
#define fagen_forward_bf16_d128_causal forward_bf16_d128_causal_sm90_kernel
#include "forward_bf16_d128_causal_sm90.cu"  // the kernel

namespace {

using namespace forward_bf16_d128_causal_sm90_kernel;

constexpr int kDynamicSmemBytes = 164864;
constexpr int kAccessBytes = 16;  // what bases and strides are multiples of
constexpr long long kL2Bytes = 32 << 20;  // for the K and V of the heads that run side by side

struct Tensor {  // of (batch, rows, heads, kHeadDimQk) elements, the last dimension contiguous
  const void* base;
  int sizes[3];              // batch, rows, heads
  const long long* strides;  // of the same, in elements
};

// Whether the kernel can address the tensor. Strides of dimensions of size 1 are never used.
bool is_aligned(const Tensor& tensor) {
  if (tensor.base == nullptr) return false;
  if (reinterpret_cast<std::uintptr_t>(tensor.base) % kAccessBytes != 0) return false;
  for (int i = 0; i < 3; ++i) {
    const long long bytes = tensor.strides[i] * static_cast<long long>(sizeof(Element));
    if (tensor.sizes[i] > 1 && bytes % kAccessBytes != 0) return false;
  }
  return true;
}

Strides as_strides(const long long* strides) { return {strides[0], strides[1], strides[2]}; }

// How many query heads run side by side: those whose K and V fit L2 together.
int heads_per_group(int batch, int heads_q, int heads_kv, int seqlen_k) {
  const long long kv_bytes = 2LL * seqlen_k * kHeadDimQk * static_cast<long long>(sizeof(Element));
  const long long kv_heads = kv_bytes == 0 ? kL2Bytes : kL2Bytes / kv_bytes;
  const long long heads = (kv_heads > 1 ? kv_heads : 1) * (heads_q / heads_kv);
  const long long all_heads = static_cast<long long>(batch) * heads_q;
  return static_cast<int>(heads < all_heads ? heads : all_heads);
}

// The driver's encoder of tensor maps, through the runtime: no -lcuda. Null if there is none.
PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

// The map of a tensor without zero dimensions; TMA moves boxes of (kChunk columns, box_rows).
cudaError_t make_map(const Tensor& tensor, cuuint32_t box_rows, TensorMap* map) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t sizes[4] = {kHeadDimQk};
  cuuint64_t bytes[3];             // strides of the last three dimensions
  const int order[3] = {1, 2, 0};  // rows, heads, batch
  for (int i = 0; i < 3; ++i) {
    const int size = tensor.sizes[order[i]];
    const long long stride = size > 1 ? tensor.strides[order[i]] : kHeadDimQk;
    sizes[i + 1] = static_cast<cuuint64_t>(size);
    bytes[i] = static_cast<cuuint64_t>(stride) * sizeof(Element);
  }
  const cuuint32_t box[4] = {kChunk, box_rows, 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap), "the kernel declares another size");
  const CUresult result = encode(
      reinterpret_cast<CUtensorMap*>(map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      const_cast<void*>(tensor.base), sizes, bytes, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      kChunk == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

extern "C" cudaError_t forward_bf16_d128_causal_sm90_launch(
    const void* q, const void* k, const void* v, void* o, float* lse, int batch, int heads_q,
    int heads_kv, int seqlen_q, int seqlen_k, const long long q_strides[3],
    const long long k_strides[3], const long long v_strides[3], const long long o_strides[3],
    float softmax_scale, cudaStream_t stream) {
  if (batch < 0 || heads_q < 0 || heads_kv < 0 || seqlen_q < 0 || seqlen_k < 0) {
    return cudaErrorInvalidValue;
  }
  if (!std::isfinite(softmax_scale) || softmax_scale < 0.0f) return cudaErrorInvalidValue;
  if (batch == 0 || heads_q == 0 || seqlen_q == 0) return cudaSuccess;  // no output
  if (heads_kv == 0 || heads_q % heads_kv != 0) return cudaErrorInvalidValue;

  const long long m_blocks = (static_cast<long long>(seqlen_q) + kTileRows - 1) / kTileRows;
  const long long heads = static_cast<long long>(batch) * heads_q;
  // Tile indices and the grid's x are 32 bits.
  if (heads > INT_MAX / kCluster / m_blocks) return cudaErrorInvalidValue;

  const Tensor q_tensor{q, {batch, seqlen_q, heads_q}, q_strides};
  const Tensor k_tensor{k, {batch, seqlen_k, heads_kv}, k_strides};
  const Tensor v_tensor{v, {batch, seqlen_k, heads_kv}, v_strides};
  const Tensor o_tensor{o, {batch, seqlen_q, heads_q}, o_strides};
  if (!is_aligned(q_tensor) || !is_aligned(o_tensor)) return cudaErrorInvalidValue;
  if (seqlen_k > 0 && (!is_aligned(k_tensor) || !is_aligned(v_tensor))) {
    return cudaErrorInvalidValue;
  }

  ForwardParams<Element> params{};
  params.q = static_cast<const Element*>(q);
  params.k = static_cast<const Element*>(k);
  params.v = static_cast<const Element*>(v);
  params.o = static_cast<Element*>(o);
  params.lse = lse;
  params.q_strides = as_strides(q_strides);
  params.k_strides = as_strides(k_strides);
  params.v_strides = as_strides(v_strides);
  params.o_strides = as_strides(o_strides);
  // 2^-100 instead of 0 gives the same weights, and keeps 0 * -infinity out of the masked scores.
  params.scale_log2 = softmax_scale == 0.0f ? 0x1p-100f : softmax_scale * 1.44269504f;
  params.batch = batch;
  params.heads_q = heads_q;
  params.heads_kv = heads_kv;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.heads_per_group = heads_per_group(batch, heads_q, heads_kv, seqlen_k);
  params.tiles = static_cast<int>(heads * m_blocks);
  int blocks = params.tiles * kCluster;
  cudaError_t error;

  TensorMap q_map{}, k_map{}, v_map{}, o_map{};
  if ((error = make_map(q_tensor, kBlockM, &q_map)) != cudaSuccess) return error;
  if ((error = make_map(o_tensor, 64, &o_map)) != cudaSuccess) return error;  // a warpgroup's rows
  if (seqlen_k > 0) {  // without keys the kernel leaves these maps alone
    if ((error = make_map(k_tensor, kBlockN / kCluster, &k_map)) != cudaSuccess) return error;
    if ((error = make_map(v_tensor, kBlockN / kCluster, &v_map)) != cudaSuccess) return error;
  }

  const auto kernel = forward_bf16_d128_causal_sm90_kernel::forward_bf16_d128_causal_sm90_kernel;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kDynamicSmemBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(blocks));
  launch.blockDim = dim3(kThreads);
  launch.dynamicSmemBytes = kDynamicSmemBytes;
  launch.stream = stream;
  return cudaLaunchKernelEx(&launch, kernel, q_map, k_map, v_map, o_map, params);
}
