// cuTensorMapEncodeTiled's types, with the values of cuda.h.
#pragma once
#include <cuda_runtime.h>

using cuuint32_t = std::uint32_t;
using cuuint64_t = std::uint64_t;
using CUresult = int;
constexpr CUresult CUDA_SUCCESS = 0;
struct alignas(128) CUtensorMap {
  cuuint64_t opaque[16];
};
enum { CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum { CU_TENSOR_MAP_INTERLEAVE_NONE = 0, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };
enum { CU_TENSOR_MAP_SWIZZLE_64B = 2, CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
using PFN_cuTensorMapEncodeTiled_v12000 = decltype(&encode_tiled);
