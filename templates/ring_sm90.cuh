// Rings of buffers in shared memory: a producer fills them by TMA, consumers read and return them.
#pragma once
#include "ptx_sm90.cuh"

// A position in a ring of buffers and the parity of its barriers.
template <int kDepth>
struct RingPosition {
  u32 stage = 0;  // unsigned: added to 64-bit descriptors as it is
  u32 parity = 0;

  DEVICE void advance() {
    if (++stage == kDepth) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The barriers of a ring of kDepth buffers, each of which arrives in kSlices parts.
template <int kDepth, int kSlices>
struct Ring {
  using Position = RingPosition<kDepth>;

  u64 (&full)[kDepth][kSlices];  // in shared memory
  u64 (&empty)[kDepth];

  // One thread, before all others. A buffer is empty again after `returns` arrivals.
  DEVICE void init(int stage, u32 returns) const {
    for (int slice = 0; slice < kSlices; ++slice) mbarrier_init(&full[stage][slice], 1);
    mbarrier_init(&empty[stage], returns);
  }

  // ---- the producer ----

  // Until the buffer is empty; at first at once, as a new barrier counts as having ended parity 1.
  DEVICE void acquire(const Position& at) const { mbarrier_wait(&empty[at.stage], at.parity ^ 1); }

  // `bytes` of a part are on their way.
  DEVICE void expect(const Position& at, int slice, u32 bytes) const {
    mbarrier_arrive_expect(&full[at.stage][slice], bytes);
  }

  // ---- a consumer ----

  // Until a part is there.
  DEVICE void wait(const Position& at, int slice) const {
    mbarrier_wait(&full[at.stage][slice], at.parity);
  }

  // Until all of it is there.
  DEVICE void wait(const Position& at) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) wait(at, slice);
  }

  // Returns the buffer and goes on to the next. Every warp arrives: each has its own view of when
  // its products are done. In a cluster, at all blocks: who loads a share waits for all.
  template <int kCluster>
  DEVICE void release(Position& at, int lane) const {
    if constexpr (kCluster == 1) {
      if (lane == 0) mbarrier_arrive(&empty[at.stage]);
    } else {
      if (lane < kCluster) mbarrier_arrive_at(&empty[at.stage], lane);
    }
    at.advance();
  }
};
