/* Operations between the matrix products of a decode step on a CPU, in bf16, each in one pass over memory.
 *
 * C with GCC's vector extensions, compiled for the machine's own instructions. Each function is tested against a slow
 * reference in torch (see ops.py). ops.py checks the arguments.
 * num_threads: how many threads of the team may work (ops.py says when one is better).
 *
 * Legend: T tokens · N query heads · K kv heads · H head dim · D model dim · I intermediate · B block size. Sums are
 * fp32. Must not know: torch, Python, who owns a block.
 */

#include "team.h"
#include "vectors.h"

typedef struct {
    const bf16 *x, *weight;
    bf16 *out;
    int64_t D;
    float epsilon;
} norms;

static void norm_some(void *context, int64_t first, int64_t end, int seat) {
    const norms *all = context;
    int64_t D = all->D;
    (void)seat;
    for (int64_t t = first; t < end; t++) {
        const bf16 *row = all->x + t * D;
        vec squares = {0};
        for (int64_t d = 0; d < D; d += LANES) {
            vec wide = widen(row + d);
            squares += wide * wide;
        }
        float factor = 1.0f / sqrtf(sum(squares) / (float)D + all->epsilon);
        for (int64_t d = 0; d < D; d += LANES)
            narrow(all->out + t * D + d, round_bf16(widen(row + d) * factor) * widen(all->weight + d));
    }
}

/* out = weight * bf16(x / rms(x)), as RmsNorm rounds it. x, out: [T, D]. */
void octavo_rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t T, int64_t D, float epsilon,
                     int num_threads) {
    norms all = {x, weight, out, D, epsilon};
    team_run(norm_some, &all, T, num_threads);
}

typedef struct {
    const bf16 *gate_up;
    bf16 *out;
    int64_t I;
} silus;

static void silu_some(void *context, int64_t first, int64_t end, int seat) {
    const silus *all = context;
    int64_t I = all->I;
    (void)seat;
    for (int64_t t = first; t < end; t++) {
        const bf16 *gate = all->gate_up + t * 2 * I, *up = gate + I;
        for (int64_t i = 0; i < I; i += LANES)
            narrow(all->out + t * I + i, round_bf16(silu(widen(gate + i))) * widen(up + i));
    }
}

/* out = silu(gate) * up. gate_up: [T, 2 I], out: [T, I]. */
void octavo_silu_mul(const bf16 *gate_up, bf16 *out, int64_t T, int64_t I, int num_threads) {
    silus all = {gate_up, out, I};
    team_run(silu_some, &all, T, num_threads);
}

/* Rotates one head, rounding after each operation like model.layers.decoder.rotate. */
static inline void turn(const bf16 *x, const bf16 *cos, const bf16 *sin, bf16 *out, int64_t H) {
    int64_t half = H / 2;
    for (int64_t h = 0; h < half; h += LANES) {
        vec a = widen(x + h), b = widen(x + h + half);
        narrow(out + h, round_bf16(a * widen(cos + h)) - round_bf16(b * widen(sin + h)));
        narrow(out + h + half, round_bf16(b * widen(cos + h + half)) + round_bf16(a * widen(sin + h + half)));
    }
}

typedef struct {
    const bf16 *qkv, *cos, *sin;
    const int64_t *slot;
    bf16 *q, *k_pool, *v_pool;
    int64_t N, K, H, B;
} ropes;

static void rope_some(void *context, int64_t first, int64_t end, int seat) {
    const ropes *all = context;
    int64_t N = all->N, K = all->K, H = all->H, B = all->B;
    (void)seat;
    for (int64_t t = first; t < end; t++) {
        const bf16 *row = all->qkv + t * (N + 2 * K) * H, *c = all->cos + t * H, *s = all->sin + t * H;
        int64_t slot = all->slot[t];
        for (int64_t n = 0; n < N; n++) turn(row + n * H, c, s, all->q + (t * N + n) * H, H);
        if (slot < 0) continue;
        for (int64_t k = 0; k < K; k++) {
            int64_t place = ((slot / B * K + k) * B + slot % B) * H;
            turn(row + (N + k) * H, c, s, all->k_pool + place, H);
            memcpy(all->v_pool + place, row + (N + K + k) * H, (size_t)H * sizeof(bf16));
        }
    }
}

/* Writes rotated queries to q, [T, N, H], and rotated keys and values to their slots; slot -1: not written. qkv:
 * [T, (N + 2K) H]. cos, sin: [T, H]. */
void octavo_rope_write(const bf16 *qkv, const bf16 *cos, const bf16 *sin, const int64_t *slot, bf16 *q, bf16 *k_pool,
                       bf16 *v_pool, int64_t T, int64_t N, int64_t K, int64_t H, int64_t B, int num_threads) {
    ropes all = {qkv, cos, sin, slot, q, k_pool, v_pool, N, K, H, B};
    team_run(rope_some, &all, T, num_threads);
}
