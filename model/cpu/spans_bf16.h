/* Attention over a span of positions with AVX512-BF16, and AMX if there is, used by prefill.c. Numbers are stored in
 * pairs along the dimension that is summed over, and the weights of the softmax are bf16. Must not know: blocks,
 * chunks.
 */

#ifndef OCTAVO_SPANS_H
#define OCTAVO_SPANS_H

#include <immintrin.h>

#ifdef __AMX_BF16__
#include "tiles_amx.h"
#define TILE BLOCK_ROWS
#else
#define TILE 12 /* rows whose sums fit in registers */
#endif

#define PER_SCALE 1.44269504088896341f /* scores are exponents of two */

typedef bf16 operand;

/* Copies a query for the products. */
static inline void take_row(const bf16 *from, int64_t H, operand *to) { memcpy(to, from, (size_t)H * sizeof(bf16)); }

/* Stores key j of a panel of 32, in layout [H / 2, 32, 2]; zeros if `from` is null. */
static inline void lay_out_key(const bf16 *from, int64_t H, int64_t j, operand *panel) {
    for (int64_t h = 0; h < H; h += 2) {
        uint32_t pair = 0;
        if (from) memcpy(&pair, from + h, sizeof pair);
        memcpy(panel + (h / 2 * PANEL + j) * 2, &pair, sizeof pair);
    }
}

/* Stores value j of a panel of 32, in layout [16, H, 2]; zeros if `from` is null. */
static inline void lay_out_value(const bf16 *from, int64_t H, int64_t j, operand *panel) {
    operand *row = panel + j / 2 * 2 * H + j % 2;
    for (int64_t h = 0; h < H; h++) row[2 * h] = from ? from[h] : 0;
}

#ifdef __AMX_BF16__

static inline void begin_spans(void) { tiles_begin(TILE); }

static inline void end_spans(void) { tiles_end(); }

static void score_span(const bf16 *q, const bf16 *keys, int64_t H, int64_t num_panels, float factor, float *score) {
    __m512 by = _mm512_set1_ps(factor);
    tile_operand x = {q, 2 * H, 2 * TILE_INPUTS};
    for (int64_t p = 0; p < num_panels; p++) {
        float *to = score + p * PANEL;
        tile_operand w = {keys + p * PANEL * H, 4 * PANEL, 2 * TILE_INPUTS * PANEL};
        sum_tiles(1, 0, 0, 0, 0, x, TILE, w, H, to, SPAN);
        for (float *row = to; row < to + TILE * SPAN; row += SPAN) {
            _mm512_storeu_ps(row, _mm512_mul_ps(_mm512_loadu_ps(row), by));
            _mm512_storeu_ps(row + 16, _mm512_mul_ps(_mm512_loadu_ps(row + 16), by));
        }
    }
}

static void mix_span(const bf16 *weight, const bf16 *values, int64_t H, int64_t width, const float shrink[TILE],
                     float *sum) {
    for (int m = 0; m < TILE; m++)
        for (int64_t h = m * H; h < (m + 1) * H; h += 16)
            _mm512_storeu_ps(sum + h, _mm512_mul_ps(_mm512_loadu_ps(sum + h), _mm512_set1_ps(shrink[m])));
    tile_operand x = {weight, 2 * SPAN, 2 * TILE_INPUTS};
    for (int64_t h = 0; h < H; h += PANEL) {
        tile_operand w = {values + 2 * h, 4 * H, 2 * TILE_INPUTS * H};
        sum_tiles(1, 0, 1, 0, 0, x, TILE, w, width, sum + h, H);
    }
}

#else

static inline void begin_spans(void) {}

static inline void end_spans(void) {}

/* low, high += rows of x times 32 outputs. step: from one pair of inputs to the next in w. */
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

#endif

/* 2^x for x <= 0, with a relative error of about 2e-6; NaN stays NaN. */
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

/* One row's softmax weights in this span, in bf16; zeros from `seen` to `width`. Updates the row's maximum and total.
 * Returns the factor for earlier sums. */
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

/* out = sum / total. */
static void put_mean(const float *sum, float total, int64_t H, bf16 *out) {
    for (int64_t h = 0; h < H; h += 16) {
        __m512 mean = _mm512_div_ps(_mm512_loadu_ps(sum + h), _mm512_set1_ps(total));
        _mm256_storeu_si256((__m256i *)(out + h), (__m256i)_mm512_cvtneps_pbh(mean));
    }
}

#endif
