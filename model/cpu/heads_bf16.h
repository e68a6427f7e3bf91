/* Attention of several heads together with AVX512-BF16, used by decode.c. Products are of pairs: of a key's dimensions,
 * and of two positions' values, whose weights are rounded to bf16. Must not know: sequences, threads.
 */

#ifndef OCTAVO_HEADS_H
#define OCTAVO_HEADS_H

typedef bf16 operand;

/* Copies queries for the products: `count` numbers, then zeros up to `room`. */
static inline void take_heads(const bf16 *from, int64_t count, int64_t room, operand *to) {
    memcpy(to, from, (size_t)count * sizeof(bf16));
    memset(to + count, 0, (size_t)(room - count) * sizeof(bf16));
}

/* Scores of up to HEADS query heads at every position: score[c * HEADS + g]. Blocks may be anywhere in memory, so the
 * hardware prefetcher cannot predict the next one, nor that the values are needed soon: both are prefetched here. */
static inline void score_all(const operand *q_GH, const cached *at, float *score) {
    int64_t context = at->context, B = at->B;
    const int H = at->H;
    for (int64_t first = 0; first < context; first += B) {
        int64_t end = first + B < context ? first + B : context;
        const bf16 *k = at->k + at->table[first / B] * at->stride, *v = at->v + at->table[first / B] * at->stride;
        const bf16 *next = end < context ? at->k + at->table[end / B] * at->stride : k;
        for (int64_t c = first; c < end; c++, k += H, v += H, next += H) {
            fetch(next, H);
            fetch(v, H);
            __m512 part[HEADS];
            for (int g = 0; g < HEADS; g++) part[g] = _mm512_setzero_ps();
            for (int h = 0; h < H; h += 32) {
                __m512bh pairs = (__m512bh)_mm512_loadu_si512(k + h);
                for (int g = 0; g < HEADS; g++)
                    part[g] = _mm512_dpbf16_ps(part[g], pairs, (__m512bh)_mm512_loadu_si512(q_GH + g * H + h));
            }
            sums8((vec *)part, score + c * HEADS);
        }
    }
}

/* The weights of two positions as bf16, interleaved by head, in place of the first position's weights. */
static inline void pair_weights(float *weight) {
    const __m256i order = _mm256_setr_epi16(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    __m256i both = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weight));
    _mm256_storeu_si256((__m256i *)weight, _mm256_permutexvar_epi16(order, both));
}

/* Restores the order of 32 sums whose quarters alternate between the two registers. */
static inline void in_order(__m512 *low, __m512 *high) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    __m512 lower = _mm512_permutex2var_ps(*low, first, *high);
    *high = _mm512_permutex2var_ps(*low, second, *high);
    *low = lower;
}

/* out[g] = sum over positions of weight * value / total, for 32 dims at a time. A pair's second position may be the
 * first of another block; after the last position, it is zeros. Overwrites score with pairs of weights. */
static inline void mix_all(float *score, const float total[HEADS], const cached *at, int num_heads, bf16 *out) {
    int64_t context = at->context, B = at->B;
    const int H = at->H;
    for (int64_t c = 0; c < context; c += 2) pair_weights(score + c * HEADS);
    for (int h = 0; h < H; h += 32) {
        __m512 low[HEADS], high[HEADS];
        for (int g = 0; g < HEADS; g++) low[g] = high[g] = _mm512_setzero_ps();
        const bf16 *v = 0;
        for (int64_t c = 0, left = 0, block = 0; c < context; c += 2) {
            __m512i two[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            for (int i = 0; i < 2 && c + i < context; i++, left--, v += H) {
                if (!left) left = B, v = at->v + at->table[block++] * at->stride + h;
                two[i] = _mm512_loadu_si512(v);
            }
            __m512bh lower = (__m512bh)_mm512_unpacklo_epi16(two[0], two[1]);
            __m512bh upper = (__m512bh)_mm512_unpackhi_epi16(two[0], two[1]);
            for (int g = 0; g < HEADS; g++) {
                int32_t pair;
                memcpy(&pair, score + c * HEADS + g, sizeof pair);
                __m512bh weights = (__m512bh)_mm512_set1_epi32(pair);
                low[g] = _mm512_dpbf16_ps(low[g], lower, weights);
                high[g] = _mm512_dpbf16_ps(high[g], upper, weights);
            }
        }
        for (int g = 0; g < num_heads; g++) {
            in_order(&low[g], &high[g]);
            narrow(out + g * H + h, (vec)low[g] / total[g]);
            narrow(out + g * H + h + 16, (vec)high[g] / total[g]);
        }
    }
}

#endif
