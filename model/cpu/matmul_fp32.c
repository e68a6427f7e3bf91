/* Products of few or many rows with packed weights, for CPUs without bf16 instructions: weights and inputs are widened
 * to fp32 and multiplied as such.
 *
 * Weights are stored as in matmul.c: [N / PANEL, K / 2, PANEL, 2], so that a 32-bit word holds two inputs of an output;
 * a shift widens one bf16 of it, a mask the other. Tiles of rows are multiplied by BLOCK inputs of a panel at a time,
 * which stay in the first cache. For few rows, each tile widens them in registers as it reads them; for many, they are
 * widened into the cache, where every tile reads them. Meanwhile the next ones are fetched from memory. Every sum adds
 * the inputs in order, whatever the number of rows and threads, so that a row has the same bits in any batch.
 *
 * Legend: M rows · N outputs · K inputs (even). Must not know: torch, Python.
 */

#ifndef __AVX512BF16__

#include "lanes.h"
#include "team.h"
#include "vectors.h"

#define PANEL 32
#define TILE (MOST_SUMS / SPREAD)
#define WHOLE (PANEL / WIDTH) /* registers that hold a panel's outputs */
#define BLOCK 128             /* inputs that are multiplied at once: 16 kB as floats */
#define MOST_ROWS (36 * TILE) /* rows whose sums, and inputs in fp32, are kept at once */
#define ENOUGH (64 * 1024) /* inputs for which widening is worth sharing among threads */

enum format { PAIRS, INTEGERS };

/* Up to so many rows, each tile widens weights as it reads them; integers take more instructions. */
#define FEW(format) (WIDTH == 16 ? 8 * TILE : (format) == PAIRS ? 12 * TILE : 3 * TILE)

/* What a tile prefetches: `step` bytes from `from` on for each pair of inputs that it multiplies. Each tile has a share,
 * so that memory is busy during the later tiles too; the hardware prefetcher is too late. */
typedef struct {
    const char *from;
    int64_t step;
} ahead;

typedef struct {
    lanes even, odd; /* of WIDTH outputs, for two inputs */
} wide_pair;

static inline word_lanes words_at(const bf16 *from) {
    word_lanes words;
    memcpy(&words, from, sizeof words);
    return words;
}

/* WIDTH pairs of integers, each pair as a 16-bit number with the second one in its high byte, extended to 32 bits. */
static inline int_lanes pairs_at(const int8_t *from) {
#if defined(__AVX512F__)
    return (int_lanes)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    return (int_lanes)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (int_lanes)vmovl_s16(vreinterpret_s16_s8(vld1_s8(from)));
#else
    int16_t pairs __attribute__((vector_size(2 * WIDTH)));
    memcpy(&pairs, from, sizeof pairs);
    return __builtin_convertvector(pairs, int_lanes);
#endif
}

/* The weights of WIDTH outputs for two inputs. index: in weights, of the first output's first input. */
static inline wide_pair widened(const void *panel, const enum format format, int64_t index) {
    if (format == INTEGERS) {
        int_lanes pairs = pairs_at((const int8_t *)panel + index);
        int_lanes even = (pairs << 24) >> 24, odd = pairs >> 8;
        return (wide_pair){__builtin_convertvector(even, lanes), __builtin_convertvector(odd, lanes)};
    }
    word_lanes words = words_at((const bf16 *)panel + index);
    return (wide_pair){(lanes)(words << 16), (lanes)(words & 0xffff0000u)};
}

/* out: [rows, PANEL] += rows of x times spread * WIDTH outputs of a panel, from column `first`, over `count` inputs.
 * rows, spread, format: compile-time constants in each call, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void stream(const int rows, const int spread, const enum format format,
                                                         const float *x, int64_t stride, int64_t count,
                                                         const void *panel, ahead next, int64_t first, float *out) {
    lanes sums[TILE][WHOLE]; /* constant sizes, or they would be in memory */
    for (int m = 0; m < rows; m++)
        for (int j = 0; j < spread; j++) sums[m][j] = lanes_at(out + m * PANEL + first + j * WIDTH);
    for (int64_t k = 0; k < count; k += 2, next.from += next.step) {
        __builtin_prefetch(next.from, 0, 2);
        if (format == PAIRS && spread == WHOLE) __builtin_prefetch(next.from + 64, 0, 2);
        wide_pair w[WHOLE];
        for (int j = 0; j < spread; j++) w[j] = widened(panel, format, k * PANEL + 2 * (first + j * WIDTH));
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < spread; j++) sums[m][j] += w[j].even * x[m * stride + k];
        if (format == PAIRS && MOST_SUMS == 12) { /* read words again: kept ones would drive sums from registers */
            __asm__ volatile("" ::: "memory");
            for (int j = 0; j < spread; j++) w[j] = widened(panel, format, k * PANEL + 2 * (first + j * WIDTH));
        }
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < spread; j++) sums[m][j] += w[j].odd * x[m * stride + k + 1];
    }
    for (int m = 0; m < rows; m++)
        for (int j = 0; j < spread; j++) put_lanes(out + m * PANEL + first + j * WIDTH, sums[m][j]);
}

/* As many outputs at once as there are registers for, so that a panel is read once if possible. */
#define SPREAD_OF(rows) ((rows) * WHOLE <= MOST_SUMS ? WHOLE : (rows) * 2 * SPREAD <= MOST_SUMS ? 2 * SPREAD : SPREAD)

static inline __attribute__((always_inline)) void stream_panel(const int rows, const enum format format, const float *x,
                                                               int64_t stride, int64_t count, const void *panel,
                                                               ahead next, float *out) {
    const int spread = SPREAD_OF(rows);
    ahead some = {next.from, next.step * spread / WHOLE};
    for (int64_t first = 0; first < PANEL; first += spread * WIDTH, some.from += count / 2 * some.step)
        stream(rows, spread, format, x, stride, count, panel, some, first, out);
}

#if MOST_SUMS == 28
#define EACH_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) \
    CASE(12) CASE(13) CASE(14)
#elif MOST_SUMS == 24
#define EACH_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) \
    CASE(12)
#else
#define EACH_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif

/* out: [rows, PANEL] += up to TILE rows of x times `count` inputs of a panel. */
static void tile_times_panel(int64_t rows, const enum format format, const float *x, int64_t stride, int64_t count,
                             const void *panel, ahead next, float *out) {
#define PAIRS_CASE(n) case n: stream_panel(n, PAIRS, x, stride, count, panel, next, out); break;
#define INTEGERS_CASE(n) case n: stream_panel(n, INTEGERS, x, stride, count, panel, next, out); break;
    if (format == PAIRS) switch (rows) { EACH_ROWS(PAIRS_CASE) }
    else switch (rows) { EACH_ROWS(INTEGERS_CASE) }
}

/* Widens `count` inputs of a panel to [count, PANEL] floats. */
static inline __attribute__((always_inline)) void widen_block(const enum format format, const void *panel,
                                                              int64_t count, float *to) {
    for (int64_t k = 0; k < count; k += 2)
        for (int64_t n = 0; n < PANEL; n += WIDTH) {
            wide_pair w = widened(panel, format, k * PANEL + 2 * n);
            put_lanes(to + k * PANEL + n, w.even);
            put_lanes(to + (k + 1) * PANEL + n, w.odd);
        }
}

/* out: [rows, PANEL] += rows of x times a widened block. */
static inline __attribute__((always_inline)) void add_block(const int rows, const float *x, int64_t stride, int64_t K,
                                                            const float *block, ahead next, float *out) {
    for (int64_t i = 0; i < K / 2 * next.step; i += 64) __builtin_prefetch(next.from + i, 0, 2);
    for (int64_t first = 0; first < PANEL; first += SPREAD * WIDTH) {
        lanes sums[TILE][SPREAD];
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < SPREAD; j++) sums[m][j] = lanes_at(out + m * PANEL + first + j * WIDTH);
        add_products(rows, x, stride, K, block + first, PANEL, sums);
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < SPREAD; j++) put_lanes(out + m * PANEL + first + j * WIDTH, sums[m][j]);
    }
}

static void add_block_to(int64_t rows, const float *x, int64_t stride, int64_t K, const float *block, ahead next,
                         float *out) {
#define BLOCK_CASE(n) case n: add_block(n, x, stride, K, block, next, out); break;
    switch (rows) { EACH_ROWS(BLOCK_CASE) }
}

const char *octavo_arithmetic(void) {
#if WIDTH == 16
    return "AVX-512, weights widened to fp32";
#elif defined(__AVX2__)
    return "AVX2, weights widened to fp32";
#elif defined(__aarch64__)
    return "NEON, weights widened to fp32";
#else
    return "vectors of 4, weights widened to fp32";
#endif
}

typedef struct {
    const bf16 *x;
    const void *panels;
    int is_int8;
    const float *scale, *bias;
    void *out;
    int is_wide;
    int64_t M, N, K;
    float *x_wide; /* [M, stride] */
    int64_t stride;
    float *scratch; /* per thread: sums [M, PANEL], then a block of weights */
    size_t scratch_size;
} product;

static void widen_some(void *context, int64_t first, int64_t end, int seat) {
    const product *all = context;
    int64_t K = all->K, whole = K / LANES * LANES;
    (void)seat;
    for (int64_t m = first; m < end; m++) {
        const bf16 *from = all->x + m * K;
        float *to = all->x_wide + m * all->stride;
        for (int64_t k = 0; k < whole; k += LANES) {
            vec wide = widen(from + k);
            memcpy(to + k, &wide, sizeof wide);
        }
        for (int64_t k = whole; k < K; k++) to[k] = widen1(from[k]);
    }
}

/* Scales a row's sums, rounds them to bf16 and writes them to `out`. */
static inline void put_row(const product *all, int64_t m, int64_t column, const float *sums) {
    put_scaled(sums, all->scale + column, all->bias + column, PANEL, all->N - column, all->out, all->is_wide,
               m * all->N + column);
}

static void multiply_panel(const product *all, int64_t p, float *sums) {
    int64_t M = all->M, K = all->K, column = p * PANEL, tiles = (M + TILE - 1) / TILE, each = (M + tiles - 1) / tiles;
    const enum format format = all->is_int8 ? INTEGERS : PAIRS;
    const int64_t pair = 2 * PANEL * (all->is_int8 ? 1 : sizeof(bf16)); /* bytes */
    const int64_t at_once = M * WHOLE <= MOST_SUMS ? K : BLOCK; /* all of a panel where it is read once */
    float *block = sums + M * PANEL;
    memset(sums, 0, (size_t)(M * PANEL) * sizeof(float));
    for (int64_t first = 0; first < K; first += at_once) {
        int64_t count = K - first < at_once ? K - first : at_once;
        const char *panel = (const char *)all->panels + (column * K / (2 * PANEL) + first / 2) * pair;
        ahead next = {panel + BLOCK / 2 * pair, pair / tiles};
        if (M > FEW(format)) {
            if (all->is_int8) widen_block(INTEGERS, panel, count, block);
            else widen_block(PAIRS, panel, count, block);
        }
        for (int64_t m = 0; m < M; m += each, next.from += count / 2 * next.step) {
            int64_t rows = M - m < each ? M - m : each;
            const float *x = all->x_wide + m * all->stride + first;
            if (M > FEW(format)) add_block_to(rows, x, all->stride, count, block, next, sums + m * PANEL);
            else tile_times_panel(rows, format, x, all->stride, count, panel, next, sums + m * PANEL);
        }
    }
    for (int64_t m = 0; m < M; m++) put_row(all, m, column, sums + m * PANEL);
}

static void multiply_some(void *context, int64_t first, int64_t end, int seat) {
    const product *all = context;
    float *sums = (float *)((char *)all->scratch + (size_t)seat * all->scratch_size);
    for (int64_t p = first; p < end; p++) multiply_panel(all, p, sums);
}

/* out = x @ w.T * scale + bias. x: [M, K]; out: [M, N] in bf16, or the same values in fp32 if is_wide; panels: bf16, or
 * int8 if is_int8; scale, bias: fp32, padded to whole panels. Returns 0, or 1 if memory runs out. */
int octavo_matmul(const bf16 *x, const void *panels, int is_int8, const float *scale, const float *bias, void *out,
                  int is_wide, int64_t M, int64_t N, int64_t K, int num_threads) {
    int64_t most = M < MOST_ROWS ? M : MOST_ROWS;
    int64_t stride = ((K + 15) / 16 | 1) * 16; /* an odd number of cache lines, against conflicts between rows */
    size_t scratch_size = (size_t)(most * PANEL + (M > FEW(is_int8 ? INTEGERS : PAIRS) ? BLOCK * PANEL : 0)) * sizeof(float);
    size_t size = (size_t)(most * stride) * sizeof(float) + (size_t)num_threads * scratch_size;
    float *memory = aligned_alloc(64, size);
    if (!memory) return 1;
    size_t element = is_wide ? sizeof(float) : sizeof(bf16);
    for (int64_t m = 0; m < M; m += most) {
        int64_t rows = M - m < most ? M - m : most;
        product all = {x + m * K, panels, is_int8, scale, bias, (char *)out + (size_t)(m * N) * element, is_wide,
                       rows, N, K, memory, stride, memory + most * stride, scratch_size};
        team_run(widen_some, &all, rows, rows * K < ENOUGH ? 1 : num_threads);
        team_run(multiply_some, &all, (N + PANEL - 1) / PANEL, num_threads);
    }
    free(memory);
    return 0;
}

/* There is no fused product here: gates and ups are computed by a plain one. */
int octavo_can_gate(int64_t M, int64_t I) { return (void)M, (void)I, 0; }

int octavo_matmul_gated(const bf16 *x, const void *panels, const float *scale, const float *bias, bf16 *out, int64_t M,
                        int64_t I, int64_t K, int num_threads) {
    (void)x, (void)panels, (void)scale, (void)bias, (void)out, (void)M, (void)I, (void)K, (void)num_threads;
    return 1;
}

#else
typedef int octavo_has_bf16; /* this CPU uses matmul.c */
#endif
