// Checks forward_bf16_d128_causal_sm90.cu against attention in float64 on the CPU.
// Exit code 0: it passed.
//
// Written by fagen from emit_main.cu.j2. This line builds all of it:
//   nvcc -std=c++17 -arch=sm_90a forward_bf16_d128_causal_sm90_main.cu -o check && ./check

// Under names of its own, so that a build which compiles all the .cu files links too.
#define forward_bf16_d128_causal_sm90_launch forward_bf16_d128_causal_sm90_checked_launch
#define forward_bf16_d128_causal_sm90_kernel forward_bf16_d128_causal_sm90_checked_kernel
#include "forward_bf16_d128_causal_sm90_host.cu"  // the launcher, and with it the kernel

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
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

using Number = __nv_bfloat16;  // an Element that converts to float and back

// Elements that lie unused before the tensor and after each row of heads: odd where the kernel
// allows any alignment. The check poisons them.
constexpr int kPadding = kAccessBytes / static_cast<int>(sizeof(Element));
constexpr unsigned short kPoison = 0xffff;  // a NaN in fp16 and bf16
constexpr double kRoundoff = 0x1p-8;  // the largest relative error of rounding to Element

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("FAIL: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// A (batch, rows, heads, kHeadDimQk) tensor on both sides, with padding between the rows.
struct PaddedTensor {
  int batch, rows, heads;
  long long strides[3];
  std::vector<unsigned short> host;
  void* device = nullptr;

  PaddedTensor(int batch, int rows, int heads) : batch(batch), rows(rows), heads(heads) {
    strides[2] = kHeadDimQk;
    strides[1] = static_cast<long long>(heads) * kHeadDimQk + kPadding;
    strides[0] = rows * strides[1];
    host.assign(static_cast<std::size_t>(kPadding + batch * strides[0]), kPoison);
    check(cudaMalloc(&device, bytes()), "cudaMalloc");
  }
  PaddedTensor(const PaddedTensor&) = delete;
  PaddedTensor& operator=(const PaddedTensor&) = delete;
  ~PaddedTensor() { cudaFree(device); }

  std::size_t bytes() const { return host.size() * sizeof(Element); }
  void* base() const { return static_cast<Element*>(device) + kPadding; }
  Number* row(int b, int i, int h) {
    const long long offset = kPadding + b * strides[0] + i * strides[1] + h * strides[2];
    return reinterpret_cast<Number*>(host.data()) + offset;
  }
  double at(int b, int i, int h, int d) { return static_cast<float>(row(b, i, h)[d]); }

  void fill(std::mt19937& generator) {
    std::normal_distribution<float> normal;
    for (int b = 0; b < batch; ++b)
      for (int i = 0; i < rows; ++i)
        for (int h = 0; h < heads; ++h)
          for (int d = 0; d < kHeadDimQk; ++d)
            row(b, i, h)[d] = static_cast<Number>(normal(generator));
  }
  void upload() {
    check(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice), "upload");
  }
  void download() {
    check(cudaMemcpy(host.data(), device, bytes(), cudaMemcpyDeviceToHost), "download");
  }
};

// The right answer for one query of one head, and what rounding may do to it.
struct Answer {
  double o[kHeadDimQk] = {};
  double magnitude[kHeadDimQk] = {};  // the weighted mean of |V|: what P's rounding errors scale with
  double lse = -std::numeric_limits<double>::infinity();
};

Answer reference(PaddedTensor& q, PaddedTensor& k, PaddedTensor& v, double softmax_scale, int b,
                 int i, int h) {
  Answer answer;
  const int visible = kCausal ? std::clamp(i + 1 + k.rows - q.rows, 0, k.rows) : k.rows;
  if (visible == 0) return answer;
  const int kv_head = h / (q.heads / k.heads);
  std::vector<double> p(static_cast<std::size_t>(visible));
  for (int j = 0; j < visible; ++j) {
    double score = 0.0;
    for (int d = 0; d < kHeadDimQk; ++d) score += q.at(b, i, h, d) * k.at(b, j, kv_head, d);
    p[static_cast<std::size_t>(j)] = softmax_scale * score;
  }
  const double maximum = *std::max_element(p.begin(), p.end());
  double sum = 0.0;
  for (double& x : p) sum += x = std::exp(x - maximum);
  for (int j = 0; j < visible; ++j) {
    const double weight = p[static_cast<std::size_t>(j)] / sum;
    for (int d = 0; d < kHeadDimQk; ++d) {
      const double value = v.at(b, j, kv_head, d);
      answer.o[d] += weight * value;
      answer.magnitude[d] += weight * std::fabs(value);
    }
  }
  answer.lse = maximum + std::log(sum);
  return answer;
}

double larger(double a, double b) { return b > a || std::isnan(b) ? b : a; }  // NaN stays

// Whether the kernel is right on one shape; prints the largest errors.
bool passes(const Shape& shape, std::mt19937& generator) {
  PaddedTensor q(shape.batch, shape.seqlen_q, shape.heads_q);
  PaddedTensor k(shape.batch, shape.seqlen_k, shape.heads_kv);
  PaddedTensor v(shape.batch, shape.seqlen_k, shape.heads_kv);
  PaddedTensor o(shape.batch, shape.seqlen_q, shape.heads_q);
  std::vector<float> lse(static_cast<std::size_t>(shape.batch * shape.heads_q * shape.seqlen_q));
  for (PaddedTensor* input : {&q, &k, &v}) {
    input->fill(generator);
    input->upload();
  }
  o.upload();  // poison: an element that is not written shows
  float* lse_device = nullptr;
  check(cudaMalloc(&lse_device, lse.size() * sizeof(float) + 1), "cudaMalloc");
  check(cudaMemset(lse_device, 0xff, lse.size() * sizeof(float)), "cudaMemset");

  const float softmax_scale = 1.0f / std::sqrt(static_cast<float>(kHeadDimQk));
  check(forward_bf16_d128_causal_sm90_launch(q.base(), k.base(), v.base(), o.base(), lse_device, shape.batch,
            shape.heads_q, shape.heads_kv, shape.seqlen_q, shape.seqlen_k, q.strides, k.strides,
            v.strides, o.strides, softmax_scale, nullptr),
        "launch");
  check(cudaDeviceSynchronize(), "kernel");
  o.download();
  check(cudaMemcpy(lse.data(), lse_device, lse.size() * sizeof(float), cudaMemcpyDeviceToHost),
        "download");
  check(cudaFree(lse_device), "cudaFree");

  bool right = true;
  double max_error = 0.0, max_lse_error = 0.0;
  std::size_t lse_index = 0;  // (batch, heads_q, seqlen_q), contiguous
  for (int b = 0; b < shape.batch; ++b) {
    for (int h = 0; h < shape.heads_q; ++h) {
      for (int i = 0; i < shape.seqlen_q; ++i, ++lse_index) {
        const Answer answer = reference(q, k, v, softmax_scale, b, i, h);
        for (int d = 0; d < kHeadDimQk; ++d) {
          // P and O are rounded once each; a quarter more for the exponentials, and float sums.
          const double error = std::fabs(o.at(b, i, h, d) - answer.o[d]);
          const double allowed = 2.5 * kRoundoff * answer.magnitude[d];
          if (!(error <= allowed + (allowed > 0.0 ? 1e-5 : 0.0))) right = false;  // NaN is wrong
          max_error = larger(max_error, error);
        }
        const double got = lse[lse_index];
        const double lse_error = got == answer.lse ? 0.0 : std::fabs(got - answer.lse);
        if (!(lse_error <= 1e-3)) right = false;
        max_lse_error = larger(max_lse_error, lse_error);
        std::fill_n(reinterpret_cast<unsigned short*>(o.row(b, i, h)), kHeadDimQk, kPoison);
      }
    }
  }
  // All that is left of O is padding, which the kernel must not have touched.
  for (const unsigned short word : o.host) right = right && word == kPoison;

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
  std::printf("%s\n", right ? "PASS" : "FAIL");
  return right ? 0 : 1;
}
