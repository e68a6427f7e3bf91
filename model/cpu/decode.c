/* Attention of one new token per sequence over its cached keys and values, in bf16.
 *
 * All query heads of a kv head process a position together, so that each key and value is read once: as bf16 pairs if
 * the CPU multiplies these, else widened to fp32. The reference is in torch (see ops.py). ops.py checks the arguments.
 *
 * Legend: S sequences · N query heads · K kv heads · G = N / K · H head dim (a multiple of 32) · P blocks ·
 * B block size · M table width. Sums are fp32. Must not know: torch, Python, who owns a block.
 */

#include "team.h"
#include "vectors.h"

#define HEADS 8 /* query heads of one kv head that are processed together: their sums fit in registers */

/* The sums of eight vectors, by a tree of shuffles: out[i] = sum of x[i]. */
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

/* A sequence's keys and values of one kv head: the blocks of B positions that its table lists; block p starts at
 * element p * stride. */
typedef struct {
    const bf16 *k, *v;
    const int32_t *table;
    int64_t context, stride, B;
    int H;
} cached;

/* Prefetch one position's row, a cache line at a time. */
static inline void fetch(const bf16 *row, int H) {
    for (int h = 0; h < H; h += 32) __builtin_prefetch(row + h, 0, 2);
}

#ifdef __AVX512BF16__
#include "heads_bf16.h"
#else
#include "heads_fp32.h"
#endif

/* Vectors of scores after which the heads repeat. */
#define SETS (HEADS > LANES ? HEADS / LANES : 1)

/* Replaces each score by exp(scale * (score - maximum of its head)). total: the sums over positions, by head. */
static inline void soften(float *score, int64_t context, float scale, float total[HEADS]) {
    int64_t count = context * HEADS, even = count / (SETS * LANES) * (SETS * LANES);
    vec most[SETS], all[SETS], tops[SETS];
    if (even < count) memset(score + count, 0, HEADS * sizeof(float)); /* odd context: pad the last vector */
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
            vec x = (*(vec *)(score + i + s * LANES) - tops[s]) * scale;
            x = (vec)((ivec)x & ~(ivec)(x > 0.0f)); /* only that padding half can be above 0 */
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

typedef struct {
    const bf16 *q, *k_pool, *v_pool;
    int64_t stride_q, stride_table;
    const int32_t *table, *context;
    bf16 *out;
    int64_t N, K, H, B, parts;
    float scale;
    char *scratch;
    size_t scratch_size; /* bytes per thread */
} decodes;

static void attend_one(const decodes *all, int64_t job, float *score) {
    int64_t K = all->K, H = all->H, B = all->B, parts = all->parts, G = all->N / K;
    int64_t s = job / (K * parts), k = job / parts % K, first = job % parts * HEADS, head = k * G + first;
    int num_heads = (int)(G - first < HEADS ? G - first : HEADS);
    cached at = {all->k_pool + k * B * H, all->v_pool + k * B * H, all->table + s * all->stride_table, all->context[s],
                 K * B * H, B, (int)H};
    operand *q_GH = (operand *)(score + (at.context + 1) * HEADS);
    float total[HEADS];
    take_heads(all->q + s * all->stride_q + head * H, num_heads * H, HEADS * H, q_GH);
    score_all(q_GH, &at, score);
    soften(score, at.context, all->scale, total);
    mix_all(score, total, &at, num_heads, all->out + (s * all->N + head) * H);
}

static void attend_some(void *context, int64_t first, int64_t end, int seat) {
    const decodes *all = context;
    float *score = (float *)(all->scratch + (size_t)seat * all->scratch_size);
    for (int64_t job = first; job < end; job++) attend_one(all, job, score);
}

/* One new token per sequence. q, out: [S, N, H]; rows of q are stride_q apart. Returns 0, or 1 if memory runs out. */
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

