/* Attention of one sequence's new tokens over its cached prefix and themselves, for CPUs with AVX512-BF16.
 *
 * Keys and values are read from their blocks once and laid out as matmul.c wants weights (pairs of what is summed over
 * lie together), since every head of a group and every tile of rows reads them again. The softmax runs along, SPAN
 * positions at a time (Milakov and Gimelshein 2018). Spans begin at multiples of SPAN, whatever the chunk: a token has the
 * same bits however its prompt was cut. Nothing behind the context is read.
 *
 * Legend: Q new tokens · C context (cached and new) · N query heads · K kv heads · H head dim (a multiple of PANEL) ·
 * P blocks · B block size. Must not know: torch, Python, who owns a block.
 */

#include <stdint.h>

#include "team.h"

#define PANEL 32
#define TILE 12       /* rows whose sums are registers */
#define SPAN 256      /* positions between two looks at the largest score; scores of a tile stay in the first cache */
#define MOST_DIM 256

typedef uint16_t bf16;

#ifdef __AVX512BF16__
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Where position c of a kv head lies. */
typedef struct {
    const bf16 *pool;
    const int32_t *table;
    int64_t B, stride_P, H;
} place;

static inline const bf16 *row_at(const place *at, int64_t c) {
    return at->pool + at->table[c / at->B] * at->stride_P + c % at->B * at->H;
}

/* 32 keys as [H / 2, 32, 2]; zeros behind the context. */
static void lay_out_keys(const place *at, int64_t first, int64_t context, bf16 *to) {
    int64_t H = at->H;
    for (int64_t j = 0; j < PANEL; j++) {
        const bf16 *from = first + j < context ? row_at(at, first + j) : 0;
        for (int64_t h = 0; h < H; h += 2) {
            uint32_t pair = 0;
            if (from) memcpy(&pair, from + h, sizeof pair);
            memcpy(to + (h / 2 * PANEL + j) * 2, &pair, sizeof pair);
        }
    }
}

/* 32 values as [16, H, 2]; zeros behind the context. */
static void lay_out_values(const place *at, int64_t first, int64_t context, bf16 *to) {
    int64_t H = at->H;
    for (int64_t j = 0; j < PANEL; j++) {
        const bf16 *from = first + j < context ? row_at(at, first + j) : 0;
        bf16 *row = to + j / 2 * 2 * H + j % 2;
        for (int64_t h = 0; h < H; h++) row[2 * h] = from ? from[h] : 0;
    }
}

/* low, high += rows of x times 32 outputs; step: from one pair of inputs to the next. */
static inline __attribute__((always_inline)) void add_products(const bf16 *x, int64_t stride_x, int64_t pairs,
                                                               const bf16 *w, int64_t step, __m512 low[TILE],
                                                               __m512 high[TILE]) {
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(w + k * step);
        __m512bh w1 = (__m512bh)_mm512_loadu_si512(w + k * step + PANEL);
        for (int m = 0; m < TILE; m++) {
            int32_t pair;
            memcpy(&pair, x + m * stride_x + 2 * k, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            low[m] = _mm512_dpbf16_ps(low[m], w0, both);
            high[m] = _mm512_dpbf16_ps(high[m], w1, both);
        }
    }
}

static void score_span(const bf16 *q, const bf16 *keys, int64_t H, int64_t num_panels, float factor, float *score) {
    __m512 by = _mm512_set1_ps(factor);
    for (int64_t p = 0; p < num_panels; p++) {
        __m512 low[TILE], high[TILE];
        for (int m = 0; m < TILE; m++) low[m] = high[m] = _mm512_setzero_ps();
        add_products(q, H, H / 2, keys + p * PANEL * H, 2 * PANEL, low, high);
        for (int m = 0; m < TILE; m++) {
            _mm512_storeu_ps(score + m * SPAN + p * PANEL, _mm512_mul_ps(low[m], by));
            _mm512_storeu_ps(score + m * SPAN + p * PANEL + 16, _mm512_mul_ps(high[m], by));
        }
    }
}

/* Two to the x for x <= 0, to about 2e-6 of it; not a number stays that. */
static inline __m512 exp2_of(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_sub_ps(x, whole), y = _mm512_set1_ps(1.33335581e-3f);
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(9.61812911e-3f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(5.55041087e-2f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(2.40226507e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(6.93147181e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

static inline __mmask16 up_to(int64_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

/* One row's weights of this span, as bf16, zeros from `seen` to the last panel's end. Returns what earlier sums shrink by. */
static float soften_span(const float *score, int64_t seen, int64_t width, float *top, float *total, bf16 *weight) {
    if (seen <= 0) {
        memset(weight, 0, (size_t)width * sizeof(bf16));
        return 1.0f;
    }
    __m512 most = _mm512_set1_ps(*top), sums = _mm512_setzero_ps();
    for (int64_t c = 0; c < seen; c += 16)
        most = _mm512_mask_max_ps(most, up_to(seen - c), _mm512_loadu_ps(score + c), most);
    float now = _mm512_reduce_max_ps(most), shrink = exp2f(*top - now);
    __m512 by = _mm512_set1_ps(now);
    for (int64_t c = 0; c < width; c += 16) {
        __mmask16 mask = c < seen ? up_to(seen - c) : 0;
        __m512 e = _mm512_maskz_mov_ps(mask, exp2_of(_mm512_sub_ps(_mm512_loadu_ps(score + c), by)));
        sums = _mm512_add_ps(sums, e);
        _mm256_storeu_si256((__m256i *)(weight + c), (__m256i)_mm512_cvtneps_pbh(e));
    }
    *total = *total * shrink + _mm512_reduce_add_ps(sums);
    *top = now;
    return shrink;
}

static void mix_span(const bf16 *weight, const bf16 *values, int64_t H, int64_t width, const float shrink[TILE],
                     float *sum) {
    for (int64_t h = 0; h < H; h += PANEL) {
        __m512 low[TILE], high[TILE];
        for (int m = 0; m < TILE; m++) {
            low[m] = _mm512_mul_ps(_mm512_loadu_ps(sum + m * H + h), _mm512_set1_ps(shrink[m]));
            high[m] = _mm512_mul_ps(_mm512_loadu_ps(sum + m * H + h + 16), _mm512_set1_ps(shrink[m]));
        }
        add_products(weight, SPAN, width / 2, values + 2 * h, 2 * H, low, high);
        for (int m = 0; m < TILE; m++) {
            _mm512_storeu_ps(sum + m * H + h, low[m]);
            _mm512_storeu_ps(sum + m * H + h + 16, high[m]);
        }
    }
}

/* Up to TILE tokens of one head, the first at position `first`. stride: from one token to the next in q and out. */
static void attend_tile(const bf16 *q, int64_t rows, int64_t stride, int64_t first, const bf16 *keys, const bf16 *values,
                        int64_t H, float factor, bf16 *out) {
    bf16 q_MH[TILE * MOST_DIM], weight[TILE * SPAN];
    float score[TILE * SPAN], sum[TILE * MOST_DIM], top[TILE], total[TILE] = {0}, shrink[TILE];
    memset(q_MH, 0, sizeof q_MH);
    memset(sum, 0, sizeof sum);
    for (int64_t m = 0; m < rows; m++) memcpy(q_MH + m * H, q + m * stride, (size_t)H * sizeof(bf16));
    for (int m = 0; m < TILE; m++) top[m] = -INFINITY;
    for (int64_t start = 0; start < first + rows; start += SPAN) {
        int64_t left = first + rows - start, num_panels = ((left < SPAN ? left : SPAN) + PANEL - 1) / PANEL;
        int64_t width = num_panels * PANEL;
        score_span(q_MH, keys + start * H, H, num_panels, factor, score);
        for (int64_t m = 0; m < TILE; m++) {
            int64_t seen = first + (m < rows ? m : rows - 1) + 1 - start;
            shrink[m] = soften_span(score + m * SPAN, seen < width ? seen : width, width, top + m, total + m,
                                    weight + m * SPAN);
        }
        mix_span(weight, values + start * H, H, width, shrink, sum);
    }
    for (int64_t m = 0; m < rows; m++)
        for (int64_t h = 0; h < H; h += 16) {
            __m512 mean = _mm512_div_ps(_mm512_loadu_ps(sum + m * H + h), _mm512_set1_ps(total[m]));
            _mm256_storeu_si256((__m256i *)(out + m * stride + h), (__m256i)_mm512_cvtneps_pbh(mean));
        }
}

typedef struct {
    const bf16 *q, *k_pool, *v_pool;
    const int32_t *table;
    bf16 *out, *keys, *values;
    int64_t Q, C, N, K, H, B, num_panels, tiles;
    float factor;
} chunk;

static void lay_out_some(void *context, int64_t first, int64_t end, int seat) {
    const chunk *all = context;
    int64_t H = all->H, B = all->B, num_panels = all->num_panels, each = num_panels * PANEL * H;
    (void)seat;
    for (int64_t job = first; job < end; job++) {
        int64_t k = job / num_panels, position = job % num_panels * PANEL, to = k * each + position * H;
        place of_keys = {all->k_pool + k * B * H, all->table, B, all->K * B * H, H}, of_values = of_keys;
        of_values.pool = all->v_pool + k * B * H;
        lay_out_keys(&of_keys, position, all->C, all->keys + to);
        lay_out_values(&of_values, position, all->C, all->values + to);
    }
}

static void attend_some(void *context, int64_t first, int64_t end, int seat) {
    const chunk *all = context;
    int64_t N = all->N, H = all->H, each = all->num_panels * PANEL * H;
    (void)seat;
    for (int64_t job = first; job < end; job++) {
        int64_t n = job % N, k = n / (N / all->K), row = (all->tiles - 1 - job / N) * TILE; /* the longest first */
        attend_tile(all->q + (row * N + n) * H, all->Q - row < TILE ? all->Q - row : TILE, N * H, all->C - all->Q + row,
                    all->keys + k * each, all->values + k * each, H, all->factor, all->out + (row * N + n) * H);
    }
}

/* q, out: [Q, N, H]; the new tokens are the last Q of the context. Returns 0, or 1 without memory. */
int octavo_chunk_attention(const bf16 *q, const bf16 *k_pool, const bf16 *v_pool, const int32_t *table, bf16 *out,
                           int64_t Q, int64_t C, int64_t N, int64_t K, int64_t H, int64_t B, float scale,
                           int num_threads) {
    int64_t num_panels = (C + PANEL - 1) / PANEL, size = K * num_panels * PANEL * H, tiles = (Q + TILE - 1) / TILE;
    bf16 *keys = aligned_alloc(64, 2 * (size_t)size * sizeof(bf16));
    if (!keys) return 1;
    float factor = scale * 1.44269504088896341f;
    chunk all = {q, k_pool, v_pool, table, out, keys, keys + size, Q, C, N, K, H, B, num_panels, tiles, factor};
    team_run(lay_out_some, &all, K * num_panels, num_threads);
    team_run(attend_some, &all, N * tiles, num_threads);
    free(keys);
    return 0;
}

#else

int octavo_chunk_attention(const bf16 *q, const bf16 *k_pool, const bf16 *v_pool, const int32_t *table, bf16 *out,
                           int64_t Q, int64_t C, int64_t N, int64_t K, int64_t H, int64_t B, float scale,
                           int num_threads) {
    (void)q, (void)k_pool, (void)v_pool, (void)table, (void)out, (void)Q, (void)C, (void)N, (void)K, (void)H, (void)B;
    (void)scale, (void)num_threads;
    return 1;
}

#endif
