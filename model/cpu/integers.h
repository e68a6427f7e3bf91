/* 8-bit integers, -127 to 127, as bf16, exactly; for CPUs with AVX512-BF16. Must not know: what is multiplied.
 *
 * With VBMI a bf16's two bytes are looked up by the magnitude, 64 integers in seven instructions. The bytes meet within
 * quarters of a register, so its outputs come in another order until `reorder`; without VBMI they come in theirs.
 */

#ifndef OCTAVO_INTEGERS_H
#define OCTAVO_INTEGERS_H

#include <immintrin.h>
#include <stdint.h>

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
#endif
