// Checks forward_bf16_d128_causal_sm90.cu against attention in float64, computed slowly on the GPU.
// Exit code 0: it passed.
//
// Written by fagen. This line builds all of it:
//   nvcc -std=c++17 -arch=sm_90a forward_bf16_d128_causal_sm90_main.cu -o check && ./check

// Under names of its own, so that a build which compiles all the .cu files links too.
#define forward_bf16_d128_causal_sm90_launch forward_bf16_d128_causal_sm90_checked_launch
#define forward_bf16_d128_causal_sm90_kernel forward_bf16_d128_causal_sm90_checked_kernel
#include "forward_bf16_d128_causal_sm90_host.cu"  // the launcher, and with it the kernel

// Attention of single query rows, slowly and exactly: what the fast kernels are judged against.
//
// A block computes one row in one variant, all sums in double. The variants differ in what is
// rounded to the input's type:
//   exact            nothing
//   low precision    every product (scale * K, Q K^T, P V) and the normalised P, as a framework
//                    does that knows no fused attention
//   float32 softmax  P before it is normalised, and O: what a right fused kernel cannot avoid
// fagen/judge/reference.py has the same three in NumPy.
#include <cuda_bf16.h>

namespace fagen_reference {

using Element = __nv_bfloat16;

constexpr int kThreads = 256;  // the keys of a step, and at least the head dim
constexpr int kWarp = 32;

enum Variant { kExact, kLowPrecision, kFloat32Softmax };  // blockIdx.y

__device__ double minus_infinity() { return __longlong_as_double(0xfff0000000000000LL); }

__device__ double widen(Element x) { return static_cast<double>(static_cast<float>(x)); }

__device__ double rounded(double x) {
  return widen(static_cast<Element>(static_cast<float>(x)));
}

// The score of one key, by a whole warp; every lane returns it.
__device__ double score(const double* q, const Element* k, int head_dim, double softmax_scale,
                        int variant) {
  double sum = 0.0;
  for (int d = threadIdx.x % kWarp; d < head_dim; d += kWarp) {
    const double x = widen(k[d]);
    sum += q[d] * (variant == kLowPrecision ? rounded(softmax_scale * x) : x);
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  return variant == kLowPrecision ? rounded(sum) : softmax_scale * sum;
}

// Grid (rows, 3). Tensors are (batch, seqlen, heads, head_dim) with a contiguous head dim.
extern "C" __global__ void __launch_bounds__(kThreads) reference_forward(
    const Element* q, const Element* k, const Element* v,
    const long long* strides,  // (3, 3) of q, k, v: batch, row, head, in elements
    const long long* rows,     // (gridDim.x): which rows, (batch * heads_q + head) * seqlen_q + row
    double* out,               // (3, gridDim.x, head_dim)
    double* lse,               // (gridDim.x), natural logarithm, of the exact variant
    double softmax_scale, int heads_q, int heads_kv, int seqlen_q, int seqlen_k, int head_dim,
    int causal) {
  __shared__ double q_row[kThreads];
  __shared__ double scores[kThreads];  // of the keys of this step; P in the second pass
  __shared__ double maxima[kThreads], sums[kThreads];

  const int thread = threadIdx.x;
  const int variant = blockIdx.y;
  const int row = static_cast<int>(rows[blockIdx.x] % seqlen_q);
  const int head = static_cast<int>(rows[blockIdx.x] / seqlen_q % heads_q);
  const long long batch = rows[blockIdx.x] / seqlen_q / heads_q;
  const int head_kv = head / (heads_q / heads_kv);
  const int visible = causal ? max(0, min(seqlen_k, row + 1 + seqlen_k - seqlen_q)) : seqlen_k;
  q += batch * strides[0] + row * strides[1] + head * strides[2];
  k += batch * strides[3] + head_kv * strides[5];
  v += batch * strides[6] + head_kv * strides[8];

  if (thread < head_dim) q_row[thread] = widen(q[thread]);
  __syncthreads();

  const auto compute_scores = [&](int first_key, int keys) {
    for (int key = thread / kWarp; key < keys; key += kThreads / kWarp) {
      const Element* k_row = k + (first_key + key) * strides[4];
      const double s = score(q_row, k_row, head_dim, softmax_scale, variant);
      if (thread % kWarp == 0) scores[key] = s;
    }
    __syncthreads();
  };

  // First pass: the maximum, and the sum of exp(score - maximum).
  double maximum = minus_infinity(), sum = 0.0;  // of this thread's keys
  for (int first_key = 0; first_key < visible; first_key += kThreads) {
    const int keys = min(kThreads, visible - first_key);
    compute_scores(first_key, keys);
    if (thread < keys) {
      const double higher = fmax(maximum, scores[thread]);
      sum = sum * exp(maximum - higher) + exp(scores[thread] - higher);
      maximum = higher;
    }
    __syncthreads();  // before the next step overwrites the scores
  }
  maxima[thread] = maximum;
  sums[thread] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) {
      const double a = maxima[thread], b = maxima[thread + half], higher = fmax(a, b);
      if (higher > minus_infinity()) {  // else neither saw a key, and -inf - -inf is NaN
        sums[thread] = sums[thread] * exp(a - higher) + sums[thread + half] * exp(b - higher);
        maxima[thread] = higher;
      }
    }
    __syncthreads();
  }
  maximum = maxima[0];
  sum = sums[0];

  // Second pass: P, and its product with V. Each thread has a column.
  double output = 0.0;
  for (int first_key = 0; first_key < visible; first_key += kThreads) {
    const int keys = min(kThreads, visible - first_key);
    compute_scores(first_key, keys);
    if (thread < keys) {
      double p = exp(scores[thread] - maximum);
      if (variant != kFloat32Softmax) p /= sum;
      scores[thread] = variant == kExact ? p : rounded(p);
    }
    __syncthreads();
    if (thread < head_dim) {
      const Element* column = v + first_key * strides[7] + thread;
#pragma unroll 4
      for (int key = 0; key < keys; ++key) output += scores[key] * widen(column[key * strides[7]]);
    }
    __syncthreads();  // before the next step overwrites P
  }
  if (variant == kFloat32Softmax && visible > 0) output /= sum;
  const long long place = static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x;
  if (thread < head_dim) out[place * head_dim + thread] = variant == kExact ? output : rounded(output);
  if (variant == kExact && thread == 0) {
    lse[blockIdx.x] = visible > 0 ? maximum + log(sum) : minus_infinity();
  }
}

}  // namespace fagen_reference

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

struct Shape {
  int batch, heads_q, heads_kv, seqlen_q, seqlen_k;
};

constexpr Shape kShapes[] = {
    {1, 1, 1, 64, 64},    // the plain case
    {2, 4, 2, 127, 129},  // tails, and two query heads per KV head
    {1, 3, 3, 200, 65},   // more queries than keys: causal rows at the top see none
    {1, 4, 1, 1, 300},    // one query, one KV head
    {1, 2, 2, 333, 500},  // several blocks of keys
    {3, 2, 1, 65, 1},     // one key
    {1, 2, 1, 70, 0},     // no key
    {1, 2, 1, 0, 70},     // no query
};

// So many tiles that a thread block which loops over them has several.
Shape many_tiles(int sm_count) {
  const int heads = 40;
  return {(6 * sm_count * kMinBlocksPerSm + heads - 1) / heads, heads, 10, 3, 130};
}

using Number = fagen_reference::Element;  // an Element that converts to float and back

// Elements that lie unused before the tensor and after each row of heads: odd where the kernel
// allows any alignment. The check poisons them.
constexpr int kPadding = kAlignmentBytes / static_cast<int>(sizeof(Element));
constexpr unsigned short kPoison = 0xffff;  // a NaN in fp16 and bf16
constexpr double kRoundoff = 0x1p-8;  // the largest relative error of rounding to Element

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAIL: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <typename T>
struct Array {  // on both sides
  std::vector<T> host;
  T* device = nullptr;

  explicit Array(std::size_t size, T value = {}) : host(size, value) {
    check(cudaMalloc(&device, bytes() + sizeof(T)), "cudaMalloc");  // also of no element
    upload();
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { cudaFree(device); }

  std::size_t bytes() const { return host.size() * sizeof(T); }
  void upload() {
    check(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice), "upload");
  }
  void download() {
    check(cudaMemcpy(host.data(), device, bytes(), cudaMemcpyDeviceToHost), "download");
  }
};

// A (batch, rows, heads, head_dim) tensor with padding between the rows, all of it poison.
struct PaddedTensor : Array<unsigned short> {
  int batch, rows, heads, head_dim;
  long long strides[3];

  PaddedTensor(int batch, int rows, int heads, int head_dim)
      : Array(kPadding + std::size_t(batch) * rows * (heads * head_dim + kPadding), kPoison),
        batch(batch),
        rows(rows),
        heads(heads),
        head_dim(head_dim) {
    strides[2] = head_dim;
    strides[1] = heads * head_dim + kPadding;
    strides[0] = rows * strides[1];
  }

  Number* base() const { return reinterpret_cast<Number*>(device) + kPadding; }
  Number* row(int b, int i, int h) {
    const long long offset = kPadding + b * strides[0] + i * strides[1] + h * strides[2];
    return reinterpret_cast<Number*>(host.data()) + offset;
  }
  void fill(std::mt19937& generator) {
    std::normal_distribution<float> normal;
    for (int b = 0; b < batch; ++b)
      for (int i = 0; i < rows; ++i)
        for (int h = 0; h < heads; ++h)
          for (int d = 0; d < head_dim; ++d)
            row(b, i, h)[d] = static_cast<Number>(normal(generator));
    upload();
  }
};

double larger(double a, double b) { return b > a || std::isnan(b) ? b : a; }  // NaN stays

double rounded(double x) { return static_cast<float>(static_cast<Number>(static_cast<float>(x))); }

// Whether the kernel is right on one shape, twice; prints the largest errors. The rules are those of
// FlashAttention's own tests: O may be off by twice as much as attention with every product rounded.
bool passes(const Shape& shape, std::mt19937& generator) {
  PaddedTensor q(shape.batch, shape.seqlen_q, shape.heads_q, kHeadDimQk);
  PaddedTensor k(shape.batch, shape.seqlen_k, shape.heads_kv, kHeadDimQk);
  PaddedTensor v(shape.batch, shape.seqlen_k, shape.heads_kv, kHeadDimV);
  PaddedTensor o(shape.batch, shape.seqlen_q, shape.heads_q, kHeadDimV);
  for (PaddedTensor* input : {&q, &k, &v}) input->fill(generator);
  const int rows = shape.batch * shape.heads_q * shape.seqlen_q;
  const float softmax_scale = 1.0f / std::sqrt(static_cast<float>(kHeadDimQk));

  // The right answer for every row, and what rounding may do to it.
  Array<long long> strides(9), row_indices(rows);
  for (int i = 0; i < rows; ++i) row_indices.host[i] = i;
  for (int i = 0; i < 9; ++i) strides.host[i] = (i < 3 ? q : i < 6 ? k : v).strides[i % 3];
  row_indices.upload();
  strides.upload();
  const std::size_t elements = std::size_t(rows) * kHeadDimV;
  Array<double> answers(3 * elements), lse_answers(rows);
  if (rows > 0) {
    fagen_reference::reference_forward<<<dim3(rows, 3), fagen_reference::kThreads>>>(
        q.base(), k.base(), v.base(), strides.device, row_indices.device, answers.device,
        lse_answers.device, softmax_scale, shape.heads_q, shape.heads_kv, shape.seqlen_q,
        shape.seqlen_k, kHeadDimQk, kCausal);
  }
  check(cudaDeviceSynchronize(), "reference");
  answers.download();
  lse_answers.download();
  const double* const exact = answers.host.data();
  const double* const low_precision = exact + elements;
  const double* const float32_softmax = low_precision + elements;
  double low_error = 0.0, noise = 0.0, soft_squares = 0.0;
  for (std::size_t i = 0; i < elements; ++i) {
    const double x = rounded(exact[i]);
    low_error = std::max(low_error, std::fabs(low_precision[i] - exact[i]));
    noise = std::max(noise, std::fabs(rounded(rounded(x + 0.3) - 0.3) - x));
    soft_squares += std::pow(float32_softmax[i] - exact[i], 2);
  }
  const double allowed = 2.0 * low_error + 2.0 * noise;
  const double soft_rms = elements > 0 ? std::sqrt(soft_squares / elements) : 0.0;

  bool right = true;
  double max_error = 0.0, max_lse_error = 0.0;
  std::vector<unsigned short> first_run;
  for (int run = 0; run < 2; ++run) {
    Array<float> lse(rows, std::nanf(""));
    std::fill(o.host.begin(), o.host.end(), kPoison);
    o.upload();  // an element that is not written shows
    check(forward_bf16_d128_causal_sm90_launch(q.base(), k.base(), v.base(), o.base(), lse.device, shape.batch,
              shape.heads_q, shape.heads_kv, shape.seqlen_q, shape.seqlen_k, q.strides, k.strides,
              v.strides, o.strides, softmax_scale, nullptr),
          "launch");
    check(cudaDeviceSynchronize(), "kernel");
    o.download();
    lse.download();
    if (run > 0) right = right && o.host == first_run;  // to the bit
    first_run = o.host;

    double squares = 0.0;
    for (int i = 0; i < rows; ++i) {
      const int b = i / shape.seqlen_q / shape.heads_q;
      Number* const row = o.row(b, i % shape.seqlen_q, i / shape.seqlen_q % shape.heads_q);
      const double answer = lse_answers.host[i], got = lse.host[i];
      for (int d = 0; d < kHeadDimV; ++d) {
        const double error =
            std::fabs(static_cast<float>(row[d]) - exact[std::size_t(i) * kHeadDimV + d]);
        max_error = larger(max_error, error);
        squares += error * error;
        if (std::isinf(answer) && error != 0.0) right = false;  // no key: exactly 0
      }
      std::fill_n(reinterpret_cast<unsigned short*>(row), kHeadDimV, kPoison);
      const double lse_error = got == answer ? 0.0 : std::fabs(got - answer);
      if (!(lse_error <= 1e-3 + 1e-6 * std::fabs(answer))) right = false;  // NaN is wrong
      max_lse_error = larger(max_lse_error, lse_error);
    }
    const double rms = elements > 0 ? std::sqrt(squares / elements) : 0.0;
    if (elements >= 4096 && !(rms <= 1.5 * std::max(soft_rms, 0.2 * kRoundoff))) right = false;
    // All that is left of O is padding, which the kernel must not have touched.
    for (const unsigned short word : o.host) right = right && word == kPoison;
  }
  right = right && max_error <= allowed;

  std::printf("batch %d, heads %d/%d, seqlen %d x %d: max error %.2e, LSE %.2e  %s\n", shape.batch,
              shape.heads_q, shape.heads_kv, shape.seqlen_q, shape.seqlen_k, max_error,
              max_lse_error, right ? "ok" : "WRONG");
  return right;
}

}  // namespace

int main() {
  int device = 0;
  cudaDeviceProp properties{};
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::printf("forward_bf16_d128_causal_sm90 on %s\n", properties.name);

  std::mt19937 generator(0);
  bool right = true;
  for (const Shape& shape : kShapes) right = passes(shape, generator) && right;
  right = passes(many_tiles(properties.multiProcessorCount), generator) && right;
  std::printf("%s\n", right ? "PASS" : "FAIL");
  return right ? 0 : 1;
}
