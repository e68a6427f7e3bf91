/* Dot products of four 8-bit integers with NEON, used by matmul_int8.c on AArch64. Must not know: panels, tiles.
 *
 * With the dot product extension (Armv8.2 and later, nearly all servers) one is a single instruction, else four: 16-bit
 * products, two of which can be added without overflow (magnitudes are up to 127), then pairwise additions.
 *
 * dots: of WIDTH outputs. factor: weights of WIDTH outputs, four inputs each. inputs: the same four for each output.
 * RAISED: offset that is added to weights. TILE: the most rows whose dots, SPREAD_OF(rows) registers each, leave
 * registers for weights and inputs. KEPT: the most rows whose sums over groups stay in registers too, which is fastest
 * per row.
 */

#ifndef OCTAVO_DOTS_NEON_H
#define OCTAVO_DOTS_NEON_H

#include <arm_neon.h>

#include "lanes.h"
#include "vectors.h"

#define GROUP 32
#define RAISED 0
#define TILE 6
#define SPREAD_OF(rows) ((rows) <= 2 ? WHOLE : 4)
#define KEPT 0

typedef int32x4_t dots;
typedef int8x16_t factor, inputs;

static inline lanes floats_of(dots x) { return (lanes)vcvtq_f32_s32(x); }

static inline inputs four_inputs(const int8_t *from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

static inline factor factor_at(const int8_t *from) { return vld1q_s8(from); }

#ifdef __ARM_FEATURE_DOTPROD
#define ARITHMETIC "NEON dot products"
static inline dots add_dots(dots sums, factor w, inputs x) { return vdotq_s32(sums, w, x); }
#else
#define ARITHMETIC "NEON"
static inline dots add_dots(dots sums, factor w, inputs x) {
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
    return vpadalq_s16(sums, vpaddq_s16(low, high));
}
#endif

static inline uint16_t largest_magnitude(const bf16 *from) {
    uint16x8_t most = vdupq_n_u16(0);
    for (int i = 0; i < GROUP; i += 8) most = vmaxq_u16(most, vandq_u16(vld1q_u16(from + i), vdupq_n_u16(0x7fff)));
    return vmaxvq_u16(most);
}

/* Four inputs times `by`, rounded to the nearest integers. */
static inline int16x4_t words_of(const bf16 *from, float by) {
    const float middle = 12582912.0f; /* 1.5 * 2^23: the integer is in the low bits of the sum */
    lanes wide = (lanes)vshll_n_u16(vld1_u16(from), 16) * by + middle;
    return vmovn_s32((int32x4_t)((int_lanes)wide - 0x4b400000));
}

/* Rounds GROUP inputs to multiples of a unit, 1/127 of their largest magnitude; returns the unit. Compared as bits,
 * infinity is larger than any number, and NaN larger still; with either the unit is not finite, nor is the row. */
static inline float round_group(const bf16 *from, int8_t *to, int32_t *total) {
    float most = widen1(largest_magnitude(from)), by = most > 1e-30f ? 127.0f / most : 0;
    for (int i = 0; i < GROUP; i += 8)
        vst1_s8(to + i, vqmovn_s16(vcombine_s16(words_of(from + i, by), words_of(from + i + 4, by))));
    *total = 0;
    return most / 127.0f;
}

#endif
