/* What a decode step does between its matrix products, on a CPU, in bf16: one pass over memory each.
 *
 * C with GCC's vector extensions: the compiler takes what the machine has. Each
 * function has a slow reference in torch (see ops.py) that it is tested against. Arguments were checked by ops.py.
 * num_threads: how many of the team may work (ops.py says when one is better).
 *
 * Legend: T tokens · S sequences · N query heads · K kv heads · G = N / K · H head dim · D model dim · I intermediate ·
 * P blocks · B block size · M table width. Sums are fp32. Must not know: torch, Python, who owns a block.
 */

#include "team.h"
#include "vectors.h"

#define HEADS 8 /* query heads of one kv head that are worked on together: their sums fit in registers */

/* ---------------------------------------------------------------- decode attention */

/* The sums of eight vectors: out[i] = sum of x[i]. A tree of shuffles; x is overwritten. */
#if LANES == 16
#define LOW(n) __builtin_shuffle(x[2 * (n)], x[2 * (n) + 1], low)
#define HIGH(n) __builtin_shuffle(x[2 * (n)], x[2 * (n) + 1], high)

static inline void sums8(vec x[HEADS], float out[HEADS]) {
    const ivec low = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const ivec high = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    vec y[4], z[2];
    for (int i = 0; i < 4; i++) y[i] = LOW(i) + HIGH(i);
    const ivec low4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const ivec high4 = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    for (int i = 0; i < 2; i++)
        z[i] = __builtin_shuffle(y[2 * i], y[2 * i + 1], low4) + __builtin_shuffle(y[2 * i], y[2 * i + 1], high4);
    const ivec low2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
    const ivec high2 = {2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31};
    vec w = __builtin_shuffle(z[0], z[1], low2) + __builtin_shuffle(z[0], z[1], high2);
    const ivec even = {0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0};
    const ivec odd = {1, 3, 5, 7, 9, 11, 13, 15, 1, 1, 1, 1, 1, 1, 1, 1};
    vec v = __builtin_shuffle(w, even) + __builtin_shuffle(w, odd);
    memcpy(out, &v, HEADS * sizeof(float));
}
#elif defined(__AVX2__)
static inline void sums8(vec x[HEADS], float out[HEADS]) {
    __m256 y[4], z[2];
    for (int i = 0; i < 4; i++) y[i] = _mm256_hadd_ps((__m256)x[2 * i], (__m256)x[2 * i + 1]);
    for (int i = 0; i < 2; i++) {
        z[i] = _mm256_hadd_ps(y[2 * i], y[2 * i + 1]);
        _mm_storeu_ps(out + 4 * i, _mm_add_ps(_mm256_castps256_ps128(z[i]), _mm256_extractf128_ps(z[i], 1)));
    }
}
#else
static inline void sums8(vec x[HEADS], float out[HEADS]) {
    for (int i = 0; i < HEADS; i++) out[i] = sum(x[i]);
}
#endif

/* One position's row, 64 bytes at a time. */
static inline void fetch(const bf16 *row, int H) {
    for (int h = 0; h < H; h += 32) __builtin_prefetch(row + h, 0, 2);
}

/* Scores of up to HEADS query heads against every position: score[c * HEADS + g]. Blocks lie anywhere in memory, so the
 * processor does not foresee the next one, nor that their values are wanted soon: both are fetched here. */
static inline void score_all(const float *q_GH, const bf16 *k_pool, const bf16 *v_pool, const int32_t *table,
                             int64_t context, int64_t stride_P, int64_t block_size, int H, float *score) {
    for (int64_t first = 0; first < context; first += block_size) {
        int64_t end = first + block_size < context ? first + block_size : context;
        const bf16 *k = k_pool + table[first / block_size] * stride_P;
        const bf16 *v = v_pool + table[first / block_size] * stride_P;
        const bf16 *next = end < context ? k_pool + table[end / block_size] * stride_P : k;
        for (int64_t c = first; c < end; c++, k += H, v += H, next += H) {
            fetch(next, H);
            fetch(v, H);
            vec part[HEADS] = {{0}};
            for (int h = 0; h < H; h += LANES) {
                vec wide = widen(k + h);
                for (int g = 0; g < HEADS; g++) part[g] += wide * *(const vec *)(q_GH + g * H + h);
            }
            sums8(part, score + c * HEADS);
        }
    }
}

/* Vectors of scores, after which the same heads come again. */
#define SETS (HEADS > LANES ? HEADS / LANES : 1)

/* score becomes exp(score - largest of its head); returns the sums over positions by head. */
static inline void soften(float *score, int64_t context, float total[HEADS]) {
    int64_t count = context * HEADS, even = count / (SETS * LANES) * (SETS * LANES);
    vec most[SETS], all[SETS], tops[SETS];
    if (even < count) memset(score + count, 0, HEADS * sizeof(float)); /* an odd context: half a vector too many */
    for (int s = 0; s < SETS; s++) most[s] = splat(-INFINITY), all[s] = (vec){0};
    for (int64_t i = 0; i < even; i += SETS * LANES)
        for (int s = 0; s < SETS; s++) {
            vec x = *(vec *)(score + i + s * LANES);
            ivec is_more = x > most[s];
            most[s] = (vec)(((ivec)x & is_more) | ((ivec)most[s] & ~is_more));
        }
    float top[HEADS];
    for (int g = 0; g < HEADS; g++) {
        top[g] = most[g / LANES][g % LANES];
        for (int i = g + HEADS; i < LANES; i += HEADS) top[g] = most[0][i] > top[g] ? most[0][i] : top[g];
        if (even < count && score[even + g] > top[g]) top[g] = score[even + g];
    }
    for (int i = 0; i < SETS * LANES; i++) tops[i / LANES][i % LANES] = top[i % HEADS];
    for (int64_t i = 0; i < count; i += SETS * LANES)
        for (int s = 0; s < SETS; s++) {
            vec x = *(vec *)(score + i + s * LANES) - tops[s];
            x = (vec)((ivec)x & ~(ivec)(x > 0.0f)); /* only the half vector behind the end can be above */
            ivec is_nan = x != x;
            x = (vec)(((ivec)exp_of(x) & ~is_nan) | ((ivec)x & is_nan));
            *(vec *)(score + i + s * LANES) = x;
            if (i < even) all[s] += x;
        }
    for (int g = 0; g < HEADS; g++) {
        total[g] = all[g / LANES][g % LANES];
        for (int i = g + HEADS; i < LANES; i += HEADS) total[g] += all[0][i];
        if (even < count) total[g] += score[even + g];
    }
}

/* Vectors of dims whose sums of all heads are registers. */
#define MIXED (LANES == 8 ? 1 : 2)

/* out[g] = sum over positions of weight * value, for MIXED * LANES dims at a time. */
static inline void mix_all(const float *score, const float total[HEADS], const bf16 *v_pool, const int32_t *table,
                           int64_t context, int64_t stride_P, int64_t block_size, int H, int num_heads, bf16 *out) {
    for (int h = 0; h < H; h += MIXED * LANES) {
        vec a[HEADS] = {{0}}, b[HEADS] = {{0}};
        int is_wide = MIXED == 2 && h + LANES < H;
        for (int64_t first = 0; first < context; first += block_size) {
            const bf16 *v = v_pool + table[first / block_size] * stride_P + h;
            int64_t end = first + block_size < context ? first + block_size : context;
            for (int64_t c = first; c < end; c++, v += H) {
                vec v0 = widen(v), v1 = is_wide ? widen(v + LANES) : (vec){0};
                for (int g = 0; g < HEADS; g++) {
                    float weight = score[c * HEADS + g];
                    a[g] += weight * v0;
                    b[g] += weight * v1;
                }
            }
        }
        for (int g = 0; g < num_heads; g++) {
            narrow(out + g * H + h, a[g] / total[g]);
            if (is_wide) narrow(out + g * H + h + LANES, b[g] / total[g]);
        }
    }
}

typedef struct {
    const bf16 *q, *k_pool, *v_pool;
    int64_t stride_q, stride_table;
    const int32_t *table, *context;
    bf16 *out;
    int64_t N, K, H, B, parts;
    float scale;
    char *scratch;
    size_t scratch_size; /* of one seat */
} decodes;

static void attend_one(const decodes *all, int64_t job, float *q_GH) {
    int64_t K = all->K, H = all->H, B = all->B, parts = all->parts, G = all->N / K;
    int64_t s = job / (K * parts), k = job / parts % K, first = job % parts * HEADS;
    int num_heads = (int)(G - first < HEADS ? G - first : HEADS);
    float *score = q_GH + HEADS * H, total[HEADS];
    int64_t head = k * G + first, context = all->context[s];
    for (int64_t i = 0; i < HEADS * H; i++)
        q_GH[i] = i < num_heads * H ? all->scale * widen1(all->q[s * all->stride_q + head * H + i]) : 0.0f;
    const int32_t *row = all->table + s * all->stride_table;
    score_all(q_GH, all->k_pool + k * B * H, all->v_pool + k * B * H, row, context, K * B * H, B, (int)H, score);
    soften(score, context, total);
    mix_all(score, total, all->v_pool + k * B * H, row, context, K * B * H, B, (int)H, num_heads,
            all->out + (s * all->N + head) * H);
}

static void attend_some(void *context, int64_t first, int64_t end, int seat) {
    const decodes *all = context;
    float *q_GH = (float *)(all->scratch + (size_t)seat * all->scratch_size);
    for (int64_t job = first; job < end; job++) attend_one(all, job, q_GH);
}

/* One new token per sequence. q, out: [S, N, H], rows of q stride_q apart. Returns 0, or 1 without memory. */
int octavo_decode_attention(const bf16 *q, int64_t stride_q, const bf16 *k_pool, const bf16 *v_pool,
                            const int32_t *table, int64_t stride_table, const int32_t *context, bf16 *out, int64_t S,
                            int64_t N, int64_t K, int64_t H, int64_t B, float scale, int num_threads) {
    int64_t longest = 0, parts = (N / K + HEADS - 1) / HEADS;
    for (int64_t s = 0; s < S; s++) longest = context[s] > longest ? context[s] : longest;
    size_t size = (sizeof(float) * (size_t)((longest + 1) * HEADS + HEADS * H) + 63) / 64 * 64;
    char *scratch = aligned_alloc(64, (size_t)num_threads * size);
    if (!scratch) return 1;
    decodes all = {q, k_pool, v_pool, stride_q, stride_table, table, context, out, N, K, H, B, parts, scale, scratch,
                   size};
    team_run(attend_some, &all, S * K * parts, num_threads);
    free(scratch);
    return 0;
}

/* ---------------------------------------------------------------- what is done row by row */

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

/* One head, rounded after each operation as model.layers.decoder.rotate does. */
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

/* qkv: [T, (N + 2K) H]. q becomes turned queries [T, N, H]; turned keys and values go to their slots; slot -1: nowhere.
 * cos, sin: [T, H]. */
void octavo_rope_write(const bf16 *qkv, const bf16 *cos, const bf16 *sin, const int64_t *slot, bf16 *q, bf16 *k_pool,
                       bf16 *v_pool, int64_t T, int64_t N, int64_t K, int64_t H, int64_t B, int num_threads) {
    ropes all = {qkv, cos, sin, slot, q, k_pool, v_pool, N, K, H, B};
    team_run(rope_some, &all, T, num_threads);
}
