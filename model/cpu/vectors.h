/* Vectors of LANES floats for the kernels in C: conversions from and to bf16, sums, exponentials, SiLU.
 *
 * GCC's vector extensions, as wide as the CPU's registers: the compiler turns wider vectors into scalars. Lengths of
 * rows in kernels are multiples of 16. Must not know: what the numbers mean.
 */

#ifndef OCTAVO_VECTORS_H
#define OCTAVO_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));

static inline float widen1(bf16 x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}

static inline vec widen(const bf16 *x) {
#ifdef __AVX512F__ /* GCC 12 compiles the portable form to six instructions */
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16);
#elif defined(__aarch64__)
    return (vec)vshll_n_u16(vld1_u16(x), 16);
#else
    hvec half;
    memcpy(&half, x, sizeof half);
    return (vec)(__builtin_convertvector(half, uvec) << 16);
#endif
}

static inline uvec rounded_bits(vec x) {
    uvec bits = (uvec)x;
    uvec up = bits + 0x7fff + ((bits >> 16) & 1);
    uvec is_nan = (uvec)(x != x);
    return (up & ~is_nan) | (is_nan & 0x7fc00000u);
}

static inline vec round_bf16(vec x) { return (vec)(rounded_bits(x) & 0xffff0000u); }

static inline void narrow(bf16 *out, vec x) {
#ifdef __AVX512F__
    __m256i half = _mm512_cvtepi32_epi16((__m512i)(rounded_bits(x) >> 16));
#elif defined(__AVX2__)
    __m256i wide = (__m256i)(rounded_bits(x) >> 16);
    __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
#elif defined(__aarch64__)
    uint16x4_t half = vshrn_n_u32((uint32x4_t)rounded_bits(x), 16);
#else
    hvec half = __builtin_convertvector(rounded_bits(x) >> 16, hvec);
#endif
    memcpy(out, &half, sizeof half);
}

/* Writes sums * scale + bias, in bf16 or the same values in fp32 if is_wide, from out[at] on: the first `width` of
 * `count` numbers. count: a multiple of LANES, up to 32. */
static inline __attribute__((always_inline)) void put_scaled(const float *sums, const float *scale, const float *bias,
                                                             const int count, int64_t width, void *out, int is_wide,
                                                             int64_t at) {
    float wide[32];
    bf16 narrow_ones[32];
    float *wide_to = is_wide && width >= count ? (float *)out + at : wide;
    bf16 *to = !is_wide && width >= count ? (bf16 *)out + at : narrow_ones;
    for (int n = 0; n < count; n += LANES) {
        vec sum, by, more;
        memcpy(&sum, sums + n, sizeof sum);
        memcpy(&by, scale + n, sizeof by);
        memcpy(&more, bias + n, sizeof more);
        sum = sum * by + more;
        if (is_wide) sum = round_bf16(sum), memcpy(wide_to + n, &sum, sizeof sum);
        else narrow(to + n, sum);
    }
    if (width >= count) return;
    if (is_wide) memcpy((float *)out + at, wide, (size_t)width * sizeof(float));
    else memcpy((bf16 *)out + at, narrow_ones, (size_t)width * sizeof(bf16));
}

static inline float sum(vec x) {
    float total = 0;
    for (int i = LANES / 2; i; i /= 2)
        for (int j = 0; j < i; j++) x[j] += x[j + i];
    total = x[0];
    return total;
}

static inline vec splat(float x) { return x - (vec){0}; }

/* e^x for x <= 0, to about 2 units in the last place; 0 below -87. */
static inline vec exp_of(vec x) {
    ivec is_tiny = x < -87.0f;
    vec safe = (vec)(((ivec)x & ~is_tiny) | ((ivec)splat(-87.0f) & is_tiny));
    vec turns = safe * 1.44269504088896341f;
    ivec whole = __builtin_convertvector(turns - 0.5f, ivec); /* truncates: the nearest integer, since turns <= 0 */
    vec wide = __builtin_convertvector(whole, vec);
    vec rest = safe - wide * 0.693359375f - wide * -2.12194440e-4f;
    vec y = splat(1.9875691500e-4f);
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    vec scale = (vec)((whole + 127) << 23);
    return (vec)((ivec)(y * scale) & ~is_tiny);
}

/* x / (1 + e^-x), computed from e^-|x|, which never overflows. */
static inline vec silu(vec x) {
    vec small = exp_of((vec)((uvec)x | 0x80000000u));
    ivec is_negative = x < 0.0f;
    vec top = (vec)(((ivec)small & is_negative) | ((ivec)splat(1.0f) & ~is_negative));
    return x * (top / (1.0f + small));
}

#endif
