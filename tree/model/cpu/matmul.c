/* Products of a few or many rows with packed weights, for CPUs with AVX512-BF16 and without AMX.
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

#define PANEL 32
#define TILE 12

typedef uint16_t bf16;

#ifdef __AVX512BF16__
#include <immintrin.h>

static inline __m512bh pair_of(const bf16 *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

static inline void put(bf16 *out, __m512 sum, int64_t width) {
    __mmask16 mask = width >= 16 ? 0xffff : width <= 0 ? 0 : (__mmask16)((1u << width) - 1);
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(sum));
}

/* 32 integers as bf16, exactly. */
static inline __m512bh widened(const int8_t *from) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + 16))));
    return _mm512_cvtne2ps_pbh(high, low);
}

static inline __m512bh weights_at(const void *panel, const int is_int8, int64_t index) {
    if (is_int8) return widened((const int8_t *)panel + index);
    return (__m512bh)_mm512_loadu_si512((const bf16 *)panel + index);
}

/* rows, is_int8: constants where this is called, so that the sums are registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const int is_int8, const bf16 *x, int64_t K,
                                                       const void *panel, const float *scale, const float *bias,
                                                       bf16 *out, int64_t N, int64_t width) {
    __m512 low[TILE], high[TILE];
    for (int m = 0; m < rows; m++) low[m] = high[m] = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 2) {
        __m512bh w0 = weights_at(panel, is_int8, k * PANEL), w1 = weights_at(panel, is_int8, k * PANEL + PANEL);
        for (int m = 0; m < rows; m++) {
            __m512bh pair = pair_of(x + m * K + k);
            low[m] = _mm512_dpbf16_ps(low[m], w0, pair);
            high[m] = _mm512_dpbf16_ps(high[m], w1, pair);
        }
    }
    __m512 scale0 = _mm512_loadu_ps(scale), scale1 = _mm512_loadu_ps(scale + 16);
    __m512 bias0 = _mm512_loadu_ps(bias), bias1 = _mm512_loadu_ps(bias + 16);
    for (int m = 0; m < rows; m++) {
        put(out + m * N, _mm512_fmadd_ps(low[m], scale0, bias0), width);
        put(out + m * N + 16, _mm512_fmadd_ps(high[m], scale1, bias1), width - 16);
    }
}

/* Up to TILE rows times one panel. */
static void rows_times_panel(int64_t rows, const bf16 *x, int64_t K, const bf16 *panel, const float *scale,
                             const float *bias, bf16 *out, int64_t N, int64_t width) {
    switch (rows) {
#define CASE(n) case n: tile(n, 0, x, K, panel, scale, bias, out, N, width); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

/* So few rows that widening the integers as they come is cheaper than doing it once for all rows. */
#define FEW 4

static void few_rows_times_int8(int64_t rows, const bf16 *x, int64_t K, const int8_t *panel, const float *scale,
                                const float *bias, bf16 *out, int64_t N, int64_t width) {
    switch (rows) {
#define FEW_CASE(n) case n: tile(n, 1, x, K, panel, scale, bias, out, N, width); break;
        FEW_CASE(1) FEW_CASE(2) FEW_CASE(3) FEW_CASE(4)
    }
}

static inline void widen_panel(const int8_t *from, bf16 *to, int64_t count) {
    for (int64_t i = 0; i < count; i += 32) _mm512_storeu_si512(to + i, (__m512i)widened(from + i));
}

int octavo_has_matmul(void) { return 1; }

/* out = x @ w.T * scale + bias. x: [M, K], out: [M, N]; panels: bf16, or int8 where is_int8; scale, bias: fp32, padded
 * to whole panels. Returns 0, or 1 without memory. */
int octavo_matmul(const bf16 *x, const void *panels, int is_int8, const float *scale, const float *bias, bf16 *out,
                  int64_t M, int64_t N, int64_t K, int num_threads) {
    int64_t count = (N + PANEL - 1) / PANEL, each = count / (num_threads * 8), failed = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        bf16 *scratch = is_int8 && M > FEW ? aligned_alloc(64, (size_t)(K * PANEL) * sizeof(bf16)) : 0;
        if (is_int8 && M > FEW && !scratch) failed = 1;
#pragma omp for schedule(dynamic, each > 0 ? each : 1)
        for (int64_t p = 0; p < count; p++) {
            const bf16 *panel = (const bf16 *)panels + p * K * PANEL;
            if (is_int8 && M <= FEW) {
                few_rows_times_int8(M, x, K, (const int8_t *)panels + p * K * PANEL, scale + p * PANEL, bias + p * PANEL,
                                    out + p * PANEL, N, N - p * PANEL);
                continue;
            }
            if (is_int8) {
                if (!scratch) continue;
                widen_panel((const int8_t *)panels + p * K * PANEL, scratch, K * PANEL);
                panel = scratch;
            }
            for (int64_t m = 0; m < M; m += TILE)
                rows_times_panel(M - m < TILE ? M - m : TILE, x + m * K, K, panel, scale + p * PANEL,
                                 bias + p * PANEL, out + m * N + p * PANEL, N, N - p * PANEL);
        }
        free(scratch);
    }
    return (int)failed;
}

#else

int octavo_has_matmul(void) { return 0; }

int octavo_matmul(const bf16 *x, const void *panels, int is_int8, const float *scale, const float *bias, bf16 *out,
                  int64_t M, int64_t N, int64_t K, int num_threads) {
    (void)x, (void)panels, (void)is_int8, (void)scale, (void)bias, (void)out, (void)M, (void)N, (void)K;
    (void)num_threads;
    return 1;
}

#endif
