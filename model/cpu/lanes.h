/* fp32 products with vectors as wide as this CPU's registers, for CPUs without bf16 instructions.
 *
 * A tile is a few rows times SPREAD registers of outputs; all its sums stay in registers while the inputs are read.
 * Each sum adds its inputs in order, so its bits do not depend on the tile. Uses GCC's vector extensions: AVX-512, AVX2
 * with FMA, or whatever is available. Must not know: where the numbers come from.
 */

#ifndef OCTAVO_LANES_H
#define OCTAVO_LANES_H

#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16 /* floats in a register */
#define MOST_SUMS 28 /* registers available for sums: the others hold weights and an input */
#elif defined(__AVX__)
#define WIDTH 8
#define MOST_SUMS 12
#elif defined(__aarch64__)
#define WIDTH 4
#define MOST_SUMS 24
#else
#define WIDTH 4
#define MOST_SUMS 12
#endif
#define SPREAD 2

typedef float lanes __attribute__((vector_size(4 * WIDTH), may_alias));
typedef int32_t int_lanes __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t word_lanes __attribute__((vector_size(4 * WIDTH)));

static inline lanes lanes_at(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void put_lanes(float *to, lanes x) { memcpy(to, &x, sizeof x); }

/* sums[m][j] += rows of x (stride_x apart) times SPREAD registers of weights, over K inputs (step apart in w). rows: a
 * compile-time constant. */
static inline __attribute__((always_inline)) void add_products(const int rows, const float *x, int64_t stride_x,
                                                               int64_t K, const float *w, int64_t step,
                                                               lanes sums[][SPREAD]) {
    for (int64_t k = 0; k < K; k++) {
        lanes w0 = lanes_at(w + k * step), w1 = lanes_at(w + k * step + WIDTH);
        for (int m = 0; m < rows; m++) {
            float one = x[m * stride_x + k];
            sums[m][0] += w0 * one;
            sums[m][1] += w1 * one;
        }
    }
}

#endif
