/* Attention of several heads together in fp32, used by decode.c on CPUs without bf16 instructions. Keys and values are
 * widened as they are read. Must not know: sequences, threads.
 */

#ifndef OCTAVO_HEADS_H
#define OCTAVO_HEADS_H

typedef float operand;

/* Widens queries for the products: `count` numbers, then zeros up to `room`. */
static inline void take_heads(const bf16 *from, int64_t count, int64_t room, operand *to) {
    for (int64_t i = 0; i < room; i++) to[i] = i < count ? widen1(from[i]) : 0.0f;
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
            vec part[HEADS] = {{0}};
            for (int h = 0; h < H; h += LANES) {
                vec wide = widen(k + h);
                for (int g = 0; g < HEADS; g++) part[g] += wide * *(const vec *)(q_GH + g * H + h);
            }
            sums8(part, score + c * HEADS);
        }
    }
}

/* Vectors of dims for which the sums of all heads fit in registers. */
#define MIXED (LANES == 8 ? 1 : 2)

/* out[g] = sum over positions of weight * value / total, for MIXED * LANES dims at a time. */
static inline void mix_all(const float *score, const float total[HEADS], const cached *at, int num_heads, bf16 *out) {
    int64_t context = at->context, B = at->B;
    const int H = at->H;
    for (int h = 0; h < H; h += MIXED * LANES) {
        vec a[HEADS] = {{0}}, b[HEADS] = {{0}};
        int is_wide = MIXED == 2 && h + LANES < H;
        for (int64_t first = 0; first < context; first += B) {
            const bf16 *v = at->v + at->table[first / B] * at->stride + h;
            int64_t end = first + B < context ? first + B : context;
            for (int64_t c = first; c < end; c++, v += H) {
                vec v0 = widen(v), v1 = is_wide ? widen(v + LANES) : (vec){0};
                for (int g = 0; g < HEADS; g++) {
                    float weight = score[c * HEADS + g];
                    a[g] += weight * v0;
                    b[g] += weight * v1;
                }
            }
        }
        for (int g = 0; g < num_heads; g++) {
            narrow(out + g * H + h, a[g] / total[g]);
            if (is_wide) narrow(out + g * H + h + LANES, b[g] / total[g]);
        }
    }
}

#endif
