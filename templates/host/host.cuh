// What the launchers of all forward kernels share: the call, its limits, the parameters.
#pragma once

struct Tensor {  // (batch, rows, heads, head dim), the last dimension contiguous
  const void* base;
  int sizes[3];              // batch, rows, heads
  const long long* strides;  // of the same, in elements
};

struct Call {
  Tensor q, k, v, o;
  float* lse;
  float softmax_scale;

  int batch() const { return q.sizes[0]; }
  int heads_q() const { return q.sizes[2]; }
  int heads_kv() const { return k.sizes[2]; }
  int seqlen_q() const { return q.sizes[1]; }
  int seqlen_k() const { return k.sizes[1]; }
};

// Whether the kernel can address the tensor. Strides of dimensions of size 1 are never used.
bool can_address(const Tensor& tensor) {
  if (tensor.base == nullptr) return false;
  if (reinterpret_cast<std::uintptr_t>(tensor.base) % kAlignmentBytes != 0) return false;
  for (int i = 0; i < 3; ++i) {
    const long long bytes = tensor.strides[i] * static_cast<long long>(sizeof(Element));
    if (tensor.sizes[i] <= 1) continue;
    if (bytes % kAlignmentBytes != 0) return false;
    if (kAlignmentBytes > 2 && (bytes < 0 || bytes >= kMaxStrideBytes)) return false;
  }
  return true;
}

// Whether elements of the tensor share memory: O's must not.
bool is_expanded(const Tensor& tensor) {
  for (int i = 0; i < 3; ++i) {
    if (tensor.sizes[i] > 1 && tensor.strides[i] == 0) return true;
  }
  return false;
}

bool has_output(const Call& call) {
  return call.batch() > 0 && call.heads_q() > 0 && call.seqlen_q() > 0;
}

long long tiles_of(const Call& call) {  // of kTileRows queries of one head
  const long long m_blocks = (call.seqlen_q() + kTileRows - 1LL) / kTileRows;
  return m_blocks * call.batch() * call.heads_q();
}

// What the launcher's declaration asks of its arguments.
bool is_legal(const Call& call) {
  for (const Tensor* tensor : {&call.q, &call.k}) {
    for (const int size : tensor->sizes) {
      if (size < 0) return false;
    }
  }
  if (call.seqlen_q() > kMaxSeqlen || call.seqlen_k() > kMaxSeqlen) return false;
  if (!(call.softmax_scale >= 0.0f && call.softmax_scale <= kMaxScale)) return false;  // nor NaN
  if (!has_output(call)) return true;
  if (call.heads_kv() == 0 || call.heads_q() % call.heads_kv() != 0) return false;
  const long long heads = static_cast<long long>(call.batch()) * call.heads_q();
  if (heads > kMaxBlocks || tiles_of(call) > kMaxBlocks / kBlocksPerTile) return false;
  if (!can_address(call.q) || !can_address(call.o) || is_expanded(call.o)) return false;
  return call.seqlen_k() == 0 || (can_address(call.k) && can_address(call.v));
}

// How many query heads run side by side: those whose K and V fit L2 together.
int heads_per_group(const Call& call) {
  const long long row_bytes = (kHeadDimQk + kHeadDimV) * static_cast<long long>(sizeof(Element));
  const long long kv_bytes = std::max(1LL, call.seqlen_k() * row_bytes);
  const long long kv_heads = std::max(1LL, kGroupBytes / kv_bytes);
  const long long heads = kv_heads * (call.heads_q() / call.heads_kv());
  return static_cast<int>(std::min(heads, static_cast<long long>(call.batch()) * call.heads_q()));
}

// What the kernel multiplies scores by. Not 0: masked scores must stay -inf, not become 0 * -inf.
float scale_log2(float softmax_scale) {
  return static_cast<float>(std::max(softmax_scale * 1.4426950408889634, kMinScaleLog2));
}

Strides strides_of(const Tensor& tensor) {
  return {tensor.strides[0], tensor.strides[1], tensor.strides[2]};
}

Params params_of(const Call& call) {
  Params params{};
  params.q = static_cast<const Element*>(call.q.base);
  params.k = static_cast<const Element*>(call.k.base);
  params.v = static_cast<const Element*>(call.v.base);
  params.o = static_cast<Element*>(const_cast<void*>(call.o.base));
  params.lse = call.lse;
  params.q_strides = strides_of(call.q);
  params.k_strides = strides_of(call.k);
  params.v_strides = strides_of(call.v);
  params.o_strides = strides_of(call.o);
  params.scale_log2 = scale_log2(call.softmax_scale);
  params.batch = call.batch();
  params.heads_q = call.heads_q();
  params.heads_kv = call.heads_kv();
  params.seqlen_q = call.seqlen_q();
  params.seqlen_k = call.seqlen_k();
  params.heads_per_group = heads_per_group(call);
  params.tiles = static_cast<int>(tiles_of(call));
  return params;
}

// Lets the kernel have its shared memory, and says how it is launched.
cudaError_t configure(const void* kernel, int blocks, cudaStream_t stream,
                      cudaLaunchConfig_t* launch) {
  launch->gridDim = dim3(static_cast<unsigned>(blocks));
  launch->blockDim = dim3(kThreads);
  launch->dynamicSmemBytes = kDynamicSmemBytes;
  launch->stream = stream;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              kDynamicSmemBytes);
}
