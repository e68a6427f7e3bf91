/* Products of a few or many rows with packed weights, for CPUs with AVX512-BF16 and without AMX;
 * matmul_fp32.c is for those without.
 *
 * Weights lie in panels of PANEL outputs, pairs of inputs together: [N / PANEL, K / 2, PANEL, 2]. A tile of up to TILE rows
 * keeps its sums in registers while a panel streams by once. Every sum runs over the inputs in order, whatever the
 * number of rows and threads: a row has the same bits in any batch.
 *
 * Legend: M rows · N outputs (a multiple of PANEL here) · K inputs (even). Must not know: torch, Python.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"

#define PANEL 32
#define TILE 14 /* two sums a row, a pair of weights and one of inputs are 31 of the 32 registers */
#define FEWEST 4 /* rows of a tile that keep the processor busy: fewer sums wait for themselves */
#define AHEAD (128 * PANEL) /* weights that are fetched before they are wanted, where the processor by itself is late */

/* How a panel is read. PAIRS_FETCHED: for 8 rows and more, when it comes from memory; slower for fewer, and from caches. */
enum format { PAIRS, PAIRS_FETCHED, INTEGERS };
#define FETCHED_ROWS 8

typedef uint16_t bf16;

#ifdef __AVX512BF16__
#include <immintrin.h>

/* ---------------------------------------------------------------- integers
 *
 * -127 to 127 as bf16, exactly. With VBMI a bf16's two bytes are looked up by the magnitude, 64 integers in seven
 * instructions. The bytes meet within quarters of a register, so its outputs come in another order until `reorder`; without
 * VBMI they come in theirs. */

/* 32 outputs' pairs of inputs. */
typedef struct {
    __m512bh low, high;
} wide_pairs;

#ifdef __AVX512VBMI__

#define EXPONENT(i) ((i) >= 64 ? 6 : (i) >= 32 ? 5 : (i) >= 16 ? 4 : (i) >= 8 ? 3 : (i) >= 4 ? 2 : (i) >= 2 ? 1 : 0)
#define BITS(i) ((i) ? (127 + EXPONENT(i)) << 7 | ((i) << (7 - EXPONENT(i)) & 127) : 0)
#define LOW_BYTE(i) (uint8_t)(BITS(i) & 255)
#define HIGH_BYTE(i) (uint8_t)(BITS(i) >> 8)
#define FOUR(byte, i) byte((i)), byte((i) + 1), byte((i) + 2), byte((i) + 3)
#define SIXTEEN(byte, i) FOUR(byte, i), FOUR(byte, (i) + 4), FOUR(byte, (i) + 8), FOUR(byte, (i) + 12)
#define SIXTY_FOUR(byte, i) \
    SIXTEEN(byte, i), SIXTEEN(byte, (i) + 16), SIXTEEN(byte, (i) + 32), SIXTEEN(byte, (i) + 48)

static const uint8_t low_bytes[128] __attribute__((aligned(64))) = {SIXTY_FOUR(LOW_BYTE, 0), SIXTY_FOUR(LOW_BYTE, 64)};
static const uint8_t high_bytes[128] __attribute__((aligned(64))) = {SIXTY_FOUR(HIGH_BYTE, 0), SIXTY_FOUR(HIGH_BYTE, 64)};

static inline wide_pairs widened(const int8_t *from) {
    __m512i x = _mm512_loadu_si512(from), magnitude = _mm512_abs_epi8(x);
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(low_bytes), magnitude, _mm512_load_si512(low_bytes + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(high_bytes), magnitude, _mm512_load_si512(high_bytes + 64));
    high = _mm512_ternarylogic_epi64(high, x, _mm512_set1_epi8(-128), 0xf8); /* high | x & sign */
    return (wide_pairs){(__m512bh)_mm512_unpacklo_epi8(low, high), (__m512bh)_mm512_unpackhi_epi8(low, high)};
}

/* Registers of 16 outputs each, back in order. */
static inline void reorder(__m512 *low, __m512 *high) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    __m512 lower = _mm512_permutex2var_ps(*low, first, *high);
    *high = _mm512_permutex2var_ps(*low, second, *high);
    *low = lower;
}

#else

static inline __m512bh widened_half(const int8_t *from) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + 16))));
    return _mm512_cvtne2ps_pbh(high, low);
}

static inline wide_pairs widened(const int8_t *from) {
    return (wide_pairs){widened_half(from), widened_half(from + 32)};
}

static inline void reorder(__m512 *low, __m512 *high) { (void)low, (void)high; }

#endif

/* ---------------------------------------------------------------- products */

static inline __m512bh pair_of(const bf16 *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

/* Where a panel's sums go: rows N apart in `out` (bf16, or fp32 of the same values where is_wide), from its first column
 * on, of which width (at most PANEL) are there. scale, bias: the panel's. */
typedef struct {
    const float *scale, *bias;
    void *out;
    int64_t column, N, width;
    int is_wide;
} target;

static inline void put(const target *to, int64_t m, int first, __m512 sum) {
    int64_t width = to->width - first, at = m * to->N + to->column + first;
    __mmask16 mask = width >= 16 ? 0xffff : width <= 0 ? 0 : (__mmask16)((1u << width) - 1);
    sum = _mm512_fmadd_ps(sum, _mm512_loadu_ps(to->scale + first), _mm512_loadu_ps(to->bias + first));
    __m256i rounded = (__m256i)_mm512_cvtneps_pbh(sum);
    if (to->is_wide) {
        __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
        _mm512_mask_storeu_epi32((float *)to->out + at, mask, wide);
    } else {
        _mm256_mask_storeu_epi16((bf16 *)to->out + at, mask, rounded);
    }
}

static inline wide_pairs weights_at(const void *panel, const enum format format, int64_t index) {
    if (format == INTEGERS) {
        const int8_t *integers = (const int8_t *)panel + index;
        _mm_prefetch(integers + AHEAD, _MM_HINT_T1);
        return widened(integers);
    }
    const bf16 *from = (const bf16 *)panel + index;
    if (format == PAIRS_FETCHED) {
        _mm_prefetch(from + AHEAD, _MM_HINT_T1);
        _mm_prefetch(from + AHEAD + PANEL, _MM_HINT_T1);
    }
    return (wide_pairs){(__m512bh)_mm512_loadu_si512(from), (__m512bh)_mm512_loadu_si512(from + PANEL)};
}

/* Rows from m on. rows, format: constants where this is called, so that the sums are registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const enum format format, const bf16 *x,
                                                       int64_t K, const void *panel, int64_t m, const target *to) {
    __m512 low[TILE], high[TILE];
    for (int r = 0; r < rows; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 2) {
        wide_pairs w = weights_at(panel, format, k * PANEL);
        for (int r = 0; r < rows; r++) {
            __m512bh pair = pair_of(x + (m + r) * K + k);
            low[r] = _mm512_dpbf16_ps(low[r], w.low, pair);
            high[r] = _mm512_dpbf16_ps(high[r], w.high, pair);
        }
    }
    for (int r = 0; r < rows; r++) {
        if (format == INTEGERS) reorder(&low[r], &high[r]);
        put(to, m + r, 0, low[r]);
        put(to, m + r, 16, high[r]);
    }
}

/* Up to TILE rows times one panel: few rows, or after the first have brought it to the caches. */
static void rows_times_panel(int64_t rows, const bf16 *x, int64_t K, const void *panel, int64_t m, const target *to) {
    switch (rows) {
#define CASE(n) case n: tile(n, PAIRS, x, K, panel, m, to); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
    }
}

/* FETCHED_ROWS to TILE rows times one panel that lies in memory. */
static void rows_times_far_panel(int64_t rows, const bf16 *x, int64_t K, const void *panel, const target *to) {
    switch (rows) {
#define FAR_CASE(n) case n: tile(n, PAIRS_FETCHED, x, K, panel, 0, to); break;
        FAR_CASE(8) FAR_CASE(9) FAR_CASE(10) FAR_CASE(11) FAR_CASE(12) FAR_CASE(13) FAR_CASE(14)
    }
}

/* So few rows that widening the integers as they come is cheaper than doing it once for all rows. */
#define FEW (2 * TILE)

static void few_rows_times_int8(int64_t rows, const bf16 *x, int64_t K, const void *panel, int64_t m,
                                const target *to) {
    switch (rows) {
#define FEW_CASE(n) case n: tile(n, INTEGERS, x, K, panel, m, to); break;
        FEW_CASE(1) FEW_CASE(2) FEW_CASE(3) FEW_CASE(4) FEW_CASE(5) FEW_CASE(6)
        FEW_CASE(7) FEW_CASE(8) FEW_CASE(9) FEW_CASE(10) FEW_CASE(11) FEW_CASE(12) FEW_CASE(13) FEW_CASE(14)
    }
}

static inline void widen_panel(const int8_t *from, bf16 *to, int64_t count) {
    for (int64_t i = 0; i < count; i += 2 * PANEL) {
        wide_pairs w = widened(from + i);
        __m512 low = (__m512)w.low, high = (__m512)w.high;
        reorder(&low, &high);
        _mm512_storeu_ps(to + i, low);
        _mm512_storeu_ps(to + i + PANEL, high);
    }
}

const char *octavo_arithmetic(void) { return "AVX512-BF16"; }

typedef struct {
    const bf16 *x;
    const void *panels;
    int is_int8;
    const float *scale, *bias;
    void *out;
    int is_wide;
    int64_t M, N, K;
    bf16 *scratch; /* a widened panel for each seat, where there are many rows of integers */
} product;

static void multiply_panel(const product *all, int64_t p, bf16 *scratch) {
    int64_t M = all->M, K = all->K, column = p * PANEL;
    const bf16 *panel = (const bf16 *)all->panels + column * K;
    const int8_t *integers = (const int8_t *)all->panels + column * K;
    target to = {all->scale + column, all->bias + column, all->out, column, all->N, all->N - column, all->is_wide};
    int is_few = all->is_int8 && !scratch;
    if (scratch) widen_panel(integers, scratch, K * PANEL), panel = scratch;
    for (int64_t m = 0, rows; m < M; m += rows) {
        int64_t left = M - m, are_alike = m && left > TILE && left < TILE + FEWEST; /* the last two tiles */
        rows = are_alike ? (left + 1) / 2 : left < TILE ? left : TILE;
        int is_far = m == 0 && !scratch && rows >= FETCHED_ROWS;
        if (is_few) few_rows_times_int8(rows, all->x, K, integers, m, &to);
        else if (is_far) rows_times_far_panel(rows, all->x, K, panel, &to);
        else rows_times_panel(rows, all->x, K, panel, m, &to);
    }
}

static void multiply_some(void *context, int64_t first, int64_t end, int seat) {
    const product *all = context;
    bf16 *scratch = all->scratch ? all->scratch + seat * all->K * PANEL : 0;
    for (int64_t p = first; p < end; p++) multiply_panel(all, p, scratch);
}

/* out = x @ w.T * scale + bias. x: [M, K], out: [M, N] of bf16, or of fp32 with the same values where is_wide; panels:
 * bf16, or int8 where is_int8; scale, bias: fp32, padded to whole panels. Returns 0, or 1 without memory. */
int octavo_matmul(const bf16 *x, const void *panels, int is_int8, const float *scale, const float *bias, void *out,
                  int is_wide, int64_t M, int64_t N, int64_t K, int num_threads) {
    product all = {x, panels, is_int8, scale, bias, out, is_wide, M, N, K, 0};
    if (is_int8 && M > FEW) {
        all.scratch = aligned_alloc(64, (size_t)(num_threads * K * PANEL) * sizeof(bf16));
        if (!all.scratch) return 1;
    }
    team_run(multiply_some, &all, (N + PANEL - 1) / PANEL, num_threads);
    free(all.scratch);
    return 0;
}

#endif
