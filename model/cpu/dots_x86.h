/* Dot products of four 8-bit integers with AVX-512 or AVX2, used by matmul_int8.c on x86-64. Interface as in
 * dots_neon.h.
 *
 * With VNNI (of AVX-512 or AVX) four products and their sum are one instruction. It takes one factor as unsigned, so
 * 128 is added to weights, and the sums start with a correction for that. Without VNNI, the instruction also takes one
 * factor as unsigned, and a sum of two products must fit in 16 bits: the weights' magnitudes (up to 127) are multiplied
 * with inputs that are given the weights' signs. Must not know: panels, tiles.
 */

#ifndef OCTAVO_DOTS_X86_H
#define OCTAVO_DOTS_X86_H

#include "lanes.h"
#include "vectors.h"

#define GROUP 32
#define SPREAD_OF(rows) ((rows) == 1 ? WHOLE : 2)
#define KEPT (WIDTH == 16 ? 7 : 0)

#ifdef __AVX512BW__
typedef __m512i dots, inputs;
#define LOAD(from) _mm512_loadu_si512(from)
#define SPLAT(four) _mm512_set1_epi32(four)
#else
typedef __m256i dots, inputs;
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(from))
#define SPLAT(four) _mm256_set1_epi32(four)
#endif

static inline lanes floats_of(dots x) {
#ifdef __AVX512BW__
    return (lanes)_mm512_cvtepi32_ps(x);
#else
    return (lanes)_mm256_cvtepi32_ps(x);
#endif
}

static inline inputs four_inputs(const int8_t *from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    return SPLAT(four);
}

/* Inline assembly, since GCC 12 keeps sums in memory with its intrinsics for this. */
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512BW__))

#define ARITHMETIC "VNNI"
#define RAISED 128
#ifdef __AVX512VNNI__
#define TILE 8
#else
#define TILE 6
#endif
typedef dots factor;

static inline factor factor_at(const int8_t *from) { return LOAD(from) ^ SPLAT((int32_t)0x80808080u); }

static inline dots add_dots(dots sums, factor w, inputs x) {
#ifdef __AVX512VNNI__
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(x));
#else
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(w), "x"(x));
#endif
    return sums;
}

#else

#define RAISED 0
#ifdef __AVX512BW__
#define ARITHMETIC "AVX-512"
#define TILE 8
typedef struct {
    dots magnitude;
    __mmask64 is_negative;
} factor;

static inline factor factor_at(const int8_t *from) {
    dots w = LOAD(from);
    return (factor){_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}

static inline dots add_dots(dots sums, factor w, inputs x) {
    dots pairs, turned = _mm512_mask_sub_epi8(x, w.is_negative, _mm512_setzero_si512(), x);
    __asm__("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
            : "+v"(sums), "=&v"(pairs) : "v"(w.magnitude), "v"(turned), "v"(_mm512_set1_epi16(1)));
    return sums;
}
#else
#define ARITHMETIC "AVX2"
#define TILE 5
typedef struct {
    dots magnitude, sign;
} factor;

static inline factor factor_at(const int8_t *from) {
    dots w = LOAD(from);
    return (factor){_mm256_abs_epi8(w), w};
}

static inline dots add_dots(dots sums, factor w, inputs x) {
    dots pairs;
    __asm__("vpsignb %3, %4, %1\n\tvpmaddubsw %1, %2, %1\n\tvpmaddwd %5, %1, %1\n\tvpaddd %1, %0, %0"
            : "+x"(sums), "=&x"(pairs) : "x"(w.magnitude), "x"(w.sign), "x"(x), "x"(_mm256_set1_epi16(1)));
    return sums;
}
#endif
#endif

/* ---------------------------------------------------------------- inputs */

static inline uint16_t largest_magnitude(const bf16 *from) {
    const __m256i no_sign = _mm256_set1_epi16(0x7fff);
    __m256i a = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)from), no_sign);
    __m256i b = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(from + 16)), no_sign);
    __m256i more = _mm256_max_epi16(a, b);
    __m128i most = _mm_max_epi16(_mm256_castsi256_si128(more), _mm256_extracti128_si256(more, 1));
    __m128i least = _mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(-1)));
    return (uint16_t)~_mm_extract_epi16(least, 0);
}

/* 16 inputs times `by`, rounded to the nearest integers. */
static inline __m256i words_of(const bf16 *from, float by) {
    const float middle = 12582912.0f; /* 1.5 * 2^23: the integer is in the low bits of the sum */
#if LANES == 16
    return _mm512_cvtepi32_epi16((__m512i)((ivec)(widen(from) * by + middle) - 0x4b400000));
#else
    ivec first = (ivec)(widen(from) * by + middle) - 0x4b400000;
    ivec second = (ivec)(widen(from + 8) * by + middle) - 0x4b400000;
    return _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)first, (__m256i)second), 0xd8);
#endif
}

static inline int32_t total_of(__m256i words) {
    __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

/* Rounds GROUP inputs to multiples of a unit, 1/127 of their largest magnitude; returns the unit. Compared as bits,
 * infinity is larger than any number, and NaN larger still; with either the unit is not finite, nor is the row. total:
 * the sum of the rounded inputs if weights are RAISED, else 0. */
static inline float round_group(const bf16 *from, int8_t *to, int32_t *total) {
    float most = widen1(largest_magnitude(from)), by = most > 1e-30f ? 127.0f / most : 0;
    __m256i first = words_of(from, by), second = words_of(from + 16, by);
    *total = RAISED ? total_of(_mm256_add_epi16(first, second)) : 0;
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xd8);
    _mm256_storeu_si256((__m256i *)to, packed);
    return most / 127.0f;
}

#endif
