/* Attention over a span of positions in fp32, used by prefill.c on CPUs without bf16 instructions. Keys and values are
 * widened once, when they are laid out. Must not know: blocks, chunks.
 */

#ifndef OCTAVO_SPANS_H
#define OCTAVO_SPANS_H

#include "lanes.h"

#define TILE (MOST_SUMS / SPREAD) /* rows whose sums fit in registers */
#define PER_SCALE 1.0f            /* scores are exponents of e */

typedef float operand;

static inline void begin_spans(void) {}

static inline void end_spans(void) {}

/* Widens a row for the products. */
static inline void take_row(const bf16 *from, int64_t H, operand *to) {
    for (int64_t h = 0; h < H; h++) to[h] = widen1(from[h]);
}

/* Stores key j of a panel of 32, in layout [H, 32]; zeros if `from` is null. */
static inline void lay_out_key(const bf16 *from, int64_t H, int64_t j, operand *panel) {
    for (int64_t h = 0; h < H; h++) panel[h * PANEL + j] = from ? widen1(from[h]) : 0.0f;
}

/* Stores value j of a panel of 32, in layout [32, H]; zeros if `from` is null. */
static inline void lay_out_value(const bf16 *from, int64_t H, int64_t j, operand *panel) {
    if (from) take_row(from, H, panel + j * H);
    else memset(panel + j * H, 0, (size_t)H * sizeof(operand));
}

static void score_span(const operand *q, const operand *keys, int64_t H, int64_t num_panels, float factor,
                       float *score) {
    for (int64_t c = 0; c < num_panels * PANEL; c += SPREAD * WIDTH) {
        lanes sums[TILE][SPREAD];
        for (int m = 0; m < TILE; m++) sums[m][0] = sums[m][1] = (lanes){0};
        add_products(TILE, q, H, H, keys + c / PANEL * PANEL * H + c % PANEL, PANEL, sums);
        for (int m = 0; m < TILE; m++)
            for (int j = 0; j < SPREAD; j++) put_lanes(score + m * SPAN + c + j * WIDTH, sums[m][j] * factor);
    }
}

static inline vec at(const float *from) {
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline vec chosen(ivec where, vec x, vec otherwise) {
    return (vec)(((ivec)x & where) | ((ivec)otherwise & ~where));
}

/* One row's softmax weights in this span; zeros from `seen` to `width`. Updates the row's maximum and total. Returns
 * the factor for earlier sums. */
static float soften_span(const float *score, int64_t seen, int64_t width, float *top, float *total, operand *weight) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    if (seen <= 0) {
        memset(weight, 0, (size_t)width * sizeof(operand));
        return 1.0f;
    }
    vec most = splat(*top), sums = {0};
    for (int64_t c = 0; c < seen; c += LANES) {
        vec x = at(score + c);
        most = chosen((x > most) & (lane < (int)(seen - c)), x, most);
    }
    float now = *top;
    for (int i = 0; i < LANES; i++) now = most[i] > now ? most[i] : now;
    float shrink = expf(*top - now);
    for (int64_t c = 0; c < width; c += LANES) {
        vec x = chosen(lane < (int)(seen - c), at(score + c) - now, splat(-INFINITY));
        vec e = chosen(x != x, x, exp_of(x));
        sums += e;
        memcpy(weight + c, &e, sizeof e);
    }
    *total = *total * shrink + sum(sums);
    *top = now;
    return shrink;
}

static void mix_span(const operand *weight, const operand *values, int64_t H, int64_t width, const float shrink[TILE],
                     float *sum) {
    for (int64_t h = 0; h < H; h += SPREAD * WIDTH) {
        lanes sums[TILE][SPREAD];
        for (int m = 0; m < TILE; m++)
            for (int j = 0; j < SPREAD; j++) sums[m][j] = lanes_at(sum + m * H + h + j * WIDTH) * shrink[m];
        add_products(TILE, weight, SPAN, width, values + h, H, sums);
        for (int m = 0; m < TILE; m++)
            for (int j = 0; j < SPREAD; j++) put_lanes(sum + m * H + h + j * WIDTH, sums[m][j]);
    }
}

/* out = sum / total. */
static void put_mean(const float *sum, float total, int64_t H, bf16 *out) {
    for (int64_t h = 0; h < H; h += LANES) narrow(out + h, at(sum + h) / total);
}

#endif
