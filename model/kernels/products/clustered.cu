// Products of dozens to hundreds of tokens with a matrix, for Hopper; clustered.py describes them and defines the names
// in capitals:
//
//   GROUPS    warp groups that multiply, each TILES x 64 tokens of a tile; one more warp group loads
//   OUTPUTS   rows of the matrix in a tile: any multiple of 8, so that tiles fill whole rounds of a device
//   WIDTH     outputs of one instruction
//   STAGES    blocks of 64 inputs that are in flight
//   SPLITS    thread blocks of a cluster, each with a part of the inputs, which send one another their sums
//   APART     whether received sums have memory of their own, rather than that of the stages
//   THEN      what happens to the sums: PUT, ADD or GATE
//   IS_FP16   whether the numbers are float16 rather than bfloat16
//
// Below, a program is a thread block; a block is 64 inputs, 128 bytes of a row, which the copy engine swizzles over the
// banks (128-byte swizzle) as the instructions need it.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

enum { PUT, ADD, GATE };
constexpr int TOKENS = GROUPS * TILES * 64;
constexpr int RESULTS = THEN == GATE ? OUTPUTS / 2 : OUTPUTS;  // of a tile: a gate and its up give one
constexpr int THREADS = GROUPS * 128;                          // threads that multiply
constexpr int X_BYTES = TOKENS * 128, STAGE_BYTES = X_BYTES + OUTPUTS * 128;
constexpr int PITCH = OUTPUTS % 16 ? OUTPUTS : OUTPUTS + 8;  // numbers of a row of sums, padded against bank conflicts
constexpr int QUADS = OUTPUTS / 4;                           // of numbers, in a row
constexpr int MOST_SHARE = (TOKENS + SPLITS - 1) / SPLITS;   // tokens whose sums a program of a cluster adds up
constexpr int ITEMS = (MOST_SHARE * QUADS + THREADS - 1) / THREADS;  // quads per thread
constexpr int ROW_BYTES = PITCH * 4, SHARE_BYTES = MOST_SHARE * ROW_BYTES;  // of a row of sums; of the largest share

struct alignas(64) TensorMap {
  char bytes[128];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Barriers in shared memory. What is released to the copy engine only needs no fence beyond the program: a fence for
// the device takes longer than a block's products.
__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity)
      : "memory");
}

// Barrier of the threads that multiply.
__device__ __forceinline__ void meet_groups() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
// Relaxed, since by default the barrier has a fence for the device: what programs send one another is waited for by
// counting its bytes.
__device__ __forceinline__ void arrive_at_cluster() {
  if (SPLITS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  if (SPLITS > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
// To the same address in another program of the cluster, whose barrier at the same address as `bar` counts the bytes.
__device__ __forceinline__ void send_sums(int program, u32 to, u32 from, u32 bytes, u32 bar) {
  asm volatile(
      "{\n.reg .b32 there, bar;\nmapa.shared::cluster.u32 there, %0, %4;\nmapa.shared::cluster.u32 bar, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, [bar];\n}" ::"r"(to),
      "r"(from), "r"(bytes), "r"(bar), "r"(program)
      : "memory");
}

__device__ __forceinline__ void fetch_rows(u32 to, const TensorMap* map, u32 bar, int input, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(bar), "r"(input), "r"(row)
      : "memory");
}
// The matrix of gate and up is viewed as two: the copy brings RESULTS rows of each.
__device__ __forceinline__ void fetch_weights(u32 to, const TensorMap* map, u32 bar, int input, int row) {
  if (THEN != GATE) return fetch_rows(to, map, bar, input, row);
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, 0}], [%2];" ::"r"(to),
      "l"(map), "r"(bar), "r"(input), "r"(row)
      : "memory");
}

// Descriptor of an operand in shared memory: rows of 128 bytes in swizzled groups of eight (PTX ISA, "matrix
// descriptor").
__device__ __forceinline__ u64 operand(u32 at) {
  return (u64)((at & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// d[64 tokens][WIDTH] (+)= x[64][16] * w[WIDTH][16]^T.
__device__ __forceinline__ void multiply(float (&d)[WIDTH / 2], u64 x, u64 w, int has_sums) {
  @MULTIPLY@
}

#if IS_FP16
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
}
__device__ __forceinline__ float widen(u16 bits) {
  float number;
  asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
  return number;
}
#else
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
}
__device__ __forceinline__ float widen(u16 bits) { return __uint_as_float((u32)bits << 16); }
#endif

__device__ __forceinline__ float silu_times(float gate, float up) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return gate * inverse * up;
}

// Writes the activation of 64 tokens. A lane has two neighbouring outputs of every eight; four lanes exchange theirs,
// so that each writes a whole eight.
__device__ __forceinline__ void put_activation(const float (&sums)[OUTPUTS / 2], const float (&scales)[2], u16* out, int token,
                                               int output, int T, int O) {
  constexpr int EIGHTS = RESULTS / 8;
  const int lane = threadIdx.x % 32;
  const bool is_odd = lane & 1, is_far = lane & 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int t = token + half * 8 + lane / 4;
    u16* const row = out + (u64)t * O + output;
    u32 pairs[EIGHTS];
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
      const float *gate = &sums[e * 4 + half * 2], *up = &sums[(e + EIGHTS) * 4 + half * 2];
      pairs[e] = pack(silu_times(gate[0] * scales[half], up[0] * scales[half]),
                      silu_times(gate[1] * scales[half], up[1] * scales[half]));
    }
#pragma unroll
    for (int e = 0; e + 4 <= EIGHTS; e += 4) {
      const u32* p = &pairs[e];
      const u32 near0 = __shfl_xor_sync(~0u, is_odd ? p[0] : p[1], 1), near1 = __shfl_xor_sync(~0u, is_odd ? p[2] : p[3], 1);
      const u32 a = is_odd ? near0 : p[0], b = is_odd ? p[1] : near0, c = is_odd ? near1 : p[2], d = is_odd ? p[3] : near1;
      const u32 far0 = __shfl_xor_sync(~0u, is_far ? a : c, 2), far1 = __shfl_xor_sync(~0u, is_far ? b : d, 2);
      const int o = (e + lane % 4) * 8;
      if (t < T && output + o < O) *(uint4*)(row + o) = is_far ? make_uint4(far0, far1, c, d) : make_uint4(a, b, far0, far1);
    }
#pragma unroll
    for (int e = EIGHTS / 4 * 4; e < EIGHTS; e++) {
      const int o = e * 8 + lane % 4 * 2;
      if (t < T && output + o < O) *(u32*)(row + o) = pairs[e];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) __cluster_dims__(SPLITS, 1, 1)
    clustered_product_kernel(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, u16* out, const float* scale_T,
            int T, int O, int num_blocks) {
  extern __shared__ char room[];
  __shared__ u64 barriers[2 * STAGES + 1];
  const u32 stages = (shared_address(room) + 1023) & ~1023u, landing = stages + (APART ? STAGES * STAGE_BYTES : TOKENS * ROW_BYTES);
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES, landed = empty + 8 * STAGES;
  const int group = threadIdx.x / 128, split = blockIdx.x % SPLITS;
  // Token tiles vary fastest: a tile of the matrix is read while it is in the cache. If sums are split, a cluster has
  // one tile, whose sums use the stages' memory, and each of its programs adds up the sums of a share of the tile's
  // tokens.
  const int token_tiles = (T + TOKENS - 1) / TOKENS, num_tiles = token_tiles * ((O + RESULTS - 1) / RESULTS);
  const int first_tile = blockIdx.x / SPLITS, step = gridDim.x / SPLITS;
  const int first_token = first_tile % token_tiles * TOKENS, tokens = min(TOKENS, T - first_token);
  // If there are fewer tokens than a tile has, only those are loaded: the sums of stale rows are never written.
  const int fetched = T < TOKENS ? (T + 7) / 8 * 8 : TOKENS, stage_bytes = (fetched + OUTPUTS) * 128;
  const int share = (tokens + SPLITS - 1) / SPLITS, first_of_share = min(split * share, tokens);
  const int of_share = min(share, tokens - first_of_share);
  start_next();
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, GROUPS);
    }
    barrier_init(landed, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (SPLITS > 1) barrier_expect(landed, (SPLITS - 1) * of_share * ROW_BYTES);
  }
  __syncthreads();
  if (APART) arrive_at_cluster();
  const int first = num_blocks * split / SPLITS, blocks = num_blocks * (split + 1) / SPLITS - first;
  u32 before[ITEMS][2];

  if (group == GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 @FEW@;");
    if (threadIdx.x == THREADS) {
      int filled = 0;
      for (int tile = first_tile; tile < num_tiles; tile += step) {
        const int token = tile % token_tiles * TOKENS, output = tile / token_tiles * RESULTS;
        // The first tile's weights are requested before the wait: no kernel writes them.
        const int early = filled > 0 ? 0 : min(blocks, STAGES);
        for (int b = 0; b < early; b++) {
          barrier_expect(full + 8 * b, stage_bytes);
          fetch_weights(stages + b * STAGE_BYTES + X_BYTES, &w_map, full + 8 * b, (first + b) * 64, output);
        }
        if (filled == 0) wait_for_previous();
        for (int b = 0; b < blocks; b++, filled++) {
          const int s = filled % STAGES;
          const u32 at = stages + s * STAGE_BYTES;
          if (b >= early) {
            if (filled >= STAGES) barrier_wait(empty + 8 * s, filled / STAGES + 1 & 1);
            barrier_expect(full + 8 * s, stage_bytes);
            fetch_weights(at + X_BYTES, &w_map, full + 8 * s, (first + b) * 64, output);
          }
          fetch_rows(at, &x_map, full + 8 * s, (first + b) * 64, token);
        }
      }
    }
    __syncwarp();
    if (!APART) arrive_at_cluster();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 @MANY@;");
    wait_for_previous();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int used = 0;
    for (int tile = first_tile; tile < num_tiles; tile += step) {
      const int token = tile % token_tiles * TOKENS, output = tile / token_tiles * RESULTS;
      const int row = group * TILES * 64 + warp * 16;  // this warp's first row, in its group's first 64 tokens
      // What the sums are combined with is requested before they are computed.
      float scales[TILES][2];
      if (THEN == GATE) {
#pragma unroll
        for (int i = 0; i < TILES * 2; i++) {
          const int t = token + row + i / 2 * 64 + i % 2 * 8 + lane / 4;
          scales[i / 2][i % 2] = t < T ? scale_T[t] : 0.0f;
        }
      } else if (THEN == ADD) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
          const int quad = i * THREADS + threadIdx.x, o = output + quad % QUADS * 4;
          const u32* at = (const u32*)(out + (u64)(token + first_of_share + quad / QUADS) * O + o);
          const bool is_in = quad < of_share * QUADS && o < O;
          before[i][0] = is_in ? at[0] : 0;
          before[i][1] = is_in ? at[1] : 0;
        }
      }
      float sums[TILES][OUTPUTS / 2];
      for (int b = 0; b < blocks; b++, used++) {
        const u32 at = stages + used % STAGES * STAGE_BYTES;
        barrier_wait(full + 8 * (used % STAGES), used / STAGES & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u64 x = operand(at + group * TILES * 64 * 128), w = operand(at + X_BYTES);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
          for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int o = 0; o < OUTPUTS; o += WIDTH)
              multiply((float(&)[WIDTH / 2])sums[i][o / 2], x + i * (64 * 128 / 16) + k * 2, w + o * (128 / 16) + k * 2, b + k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // The previous block has been multiplied: its stage is free.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (b > 0 && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * ((used - 1) % STAGES));
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * ((used - 1) % STAGES));
      if (THEN == GATE) {
#pragma unroll
        for (int i = 0; i < TILES; i++) put_activation(sums[i], scales[i], out, token + row + i * 64, output, T, O);
      } else {
        meet_groups();  // no group is still multiplying from the stages
        if (!APART) arrive_at_cluster();
#pragma unroll
        for (int i = 0; i < TILES * 2; i++) {
          const int t = row + i / 2 * 64 + i % 2 * 8 + lane / 4;
#pragma unroll
          for (int e = 0; e < OUTPUTS / 8; e++) {
            const float* pair = &sums[i / 2][e * 4 + i % 2 * 2];
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(stages + t * ROW_BYTES + (e * 8 + lane % 4 * 2) * 4), "f"(pair[0]),
                         "f"(pair[1])
                         : "memory");
          }
        }
      }
    }
  }
  if (THEN == GATE) return;
  // Every program of the cluster has initialised its barrier and, unless APART, is done with its stages: sums may be
  // sent.
  wait_for_cluster();
  if (group < GROUPS) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    meet_groups();
    if (SPLITS > 1 && threadIdx.x < SPLITS && threadIdx.x != split) {
      const int from = min((int)threadIdx.x * share, tokens), of_other = min(share, tokens - from);
      if (of_other > 0)
        send_sums(threadIdx.x, landing + split * SHARE_BYTES, stages + from * ROW_BYTES, of_other * ROW_BYTES, landed);
    }
    if (SPLITS > 1) barrier_wait(landed, 0);
  }
  arrive_at_cluster();
  if (group < GROUPS) {
    const int output = first_tile / token_tiles * RESULTS;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int quad = i * THREADS + threadIdx.x, row = quad / QUADS, o = quad % QUADS * 4;
      if (quad < of_share * QUADS) {
        float all[4] = {0, 0, 0, 0};
#pragma unroll
        for (int s = 0; s < SPLITS; s++) {
          const u32 at = s == split ? stages + (first_of_share + row) * ROW_BYTES : landing + s * SHARE_BYTES + row * ROW_BYTES;
          float part[4];
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3])
                       : "r"(at + o * 4));
#pragma unroll
          for (int j = 0; j < 4; j++) all[j] += part[j];
        }
        if (THEN == ADD)
#pragma unroll
          for (int j = 0; j < 4; j++) all[j] += widen((u16)(before[i][j / 2] >> j % 2 * 16));
        if (output + o < O)
          *(uint2*)(out + (u64)(first_token + first_of_share + row) * O + output + o) =
              make_uint2(pack(all[0], all[1]), pack(all[2], all[3]));
      }
    }
  }
  wait_for_cluster();  // no program ends while its sums are in flight
}
