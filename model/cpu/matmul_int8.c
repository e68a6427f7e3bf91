/* Products of 8-bit integers: weights have a scale per output; inputs are rounded here, each GROUP of a row in a unit
 * of its own.
 *
 * CPUs have instructions for dot products of four integers (dots_x86.h, dots_neon.h). The dots of a group are exact,
 * and groups are added in fp32 in order, so that a row has the same bits in any batch.
 *
 * Weights are stored in panels of PANEL outputs, four inputs together: [N / PANEL, K / 4, PANEL, 4]. Rounded inputs are
 * stored as [K / GROUP, M, GROUP], so that a panel is read once for a block of rows.
 *
 * Legend: M rows · N outputs · K inputs · G groups, the last one padded with zeros. Must not know: torch, Python.
 */

#include "team.h"
#include "vectors.h"

#if defined(__AVX2__) && (defined(__AVX512BW__) || !defined(__AVX512F__))
#include "dots_x86.h"
#elif defined(__aarch64__)
#include "dots_neon.h"
#endif

#ifdef ARITHMETIC

#define PANEL 32
#define LINE 64
#define FEW_GROUPS 8       /* groups whose weights stay in the L1 cache for a block of rows */
#define BLOCK_ROWS 112     /* rows whose sums and inputs stay there too */
#define ENOUGH (64 * 1024) /* inputs for which rounding is worth sharing among threads */
#define FETCHED_ROWS (WIDTH == 16 ? 5 : 2) /* from so many rows on, weights are prefetched; fewer are faster without */
#define WHOLE (PANEL / WIDTH) /* registers that hold a panel's outputs */

typedef struct {
    const bf16 *x;
    const int8_t *panels;
    const float *scale, *bias;
    void *out;
    int is_wide;
    int64_t M, N, K, G;
    int8_t *steps; /* rounded inputs: [G, M, GROUP] */
    float *units; /* [G, M] */
    float *start; /* [M]: initial value of the sums */
    float *sums;  /* per thread: [sums_size] */
    int64_t sums_size;
} product;

static void round_some(void *context, int64_t first, int64_t end, int seat) {
    const product *all = context;
    int64_t M = all->M, K = all->K;
    (void)seat;
    for (int64_t m = first; m < end; m++) {
        float start = 0;
        for (int64_t g = 0; g < all->G; g++) {
            const bf16 *from = all->x + m * K + g * GROUP;
            bf16 last[GROUP] = {0};
            int32_t total;
            if (K - g * GROUP < GROUP) from = memcpy(last, from, (size_t)(K - g * GROUP) * sizeof(bf16));
            float unit = round_group(from, all->steps + (g * M + m) * GROUP, &total);
            all->units[g * M + m] = unit;
            start -= unit * (float)(RAISED * total);
        }
        all->start[m] = start;
    }
}

/* ---------------------------------------------------------------- products */

/* Weights that a tile prefetches: so many groups of a panel, one for each group that it multiplies. Each tile
 * prefetches a share of them, so that memory is busy during the later tiles too. */
typedef struct {
    const int8_t *from;
    int64_t groups;
} ahead;

/* to: [rows, PANEL] += rows of `count` groups, stride apart, times `spread` registers of a panel's outputs. rows,
 * spread: compile-time constants in each call, so that dots and sums stay in registers. */
static inline __attribute__((always_inline)) void add_outputs(const int rows, const int spread, const int8_t *steps,
                                                              const float *units, int64_t stride, int64_t count,
                                                              const int8_t *weights, ahead next, float *to) {
    const int is_kept = rows <= KEPT;
    lanes sums[TILE][WHOLE];
    for (int m = 0; is_kept && m < rows; m++)
        for (int j = 0; j < spread; j++) memcpy(&sums[m][j], to + m * PANEL + j * WIDTH, sizeof(lanes));
    for (int64_t g = 0; g < count; g++) {
        const int8_t *from = next.from + g * GROUP * PANEL;
        for (int i = 0; g < next.groups && i < GROUP * PANEL; i += LINE) __builtin_prefetch(from + i, 0, 2);
        dots found[TILE][WHOLE];
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < spread; j++) found[m][j] = (dots){0};
        for (int q = 0; q < GROUP / 4; q++) {
            factor w[WHOLE];
            for (int j = 0; j < spread; j++) w[j] = factor_at(weights + 4 * (q * PANEL + j * WIDTH));
            for (int m = 0; m < rows; m++) {
                inputs x = four_inputs(steps + m * GROUP + 4 * q);
                for (int j = 0; j < spread; j++) found[m][j] = add_dots(found[m][j], w[j], x);
            }
        }
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < spread; j++) {
                lanes sum = sums[m][j];
                if (!is_kept) memcpy(&sum, to + m * PANEL + j * WIDTH, sizeof sum);
                sum += floats_of(found[m][j]) * units[m];
                if (is_kept) sums[m][j] = sum;
                else memcpy(to + m * PANEL + j * WIDTH, &sum, sizeof sum);
            }
        steps += stride * GROUP, units += stride, weights += GROUP * PANEL;
    }
    for (int m = 0; is_kept && m < rows; m++)
        for (int j = 0; j < spread; j++) memcpy(to + m * PANEL + j * WIDTH, &sums[m][j], sizeof(lanes));
}

static inline __attribute__((always_inline)) void add_groups(const int rows, const int8_t *steps, const float *units,
                                                             int64_t stride, int64_t count, const int8_t *weights,
                                                             ahead next, float *to) {
    const int spread = SPREAD_OF(rows);
    for (int64_t n = 0; n < PANEL; n += spread * WIDTH, next.groups = 0)
        add_outputs(rows, spread, steps, units, stride, count, weights + 4 * n, next, to + n);
}

/* `add_groups` for up to TILE rows. */
static void add_groups_to(int64_t rows, const int8_t *steps, const float *units, int64_t stride, int64_t count,
                          const int8_t *weights, ahead next, float *to) {
    switch (rows) {
#define CASE(n) case n: add_groups(n, steps, units, stride, count, weights, next, to); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#if TILE >= 6
        CASE(6)
#endif
#if TILE >= 8
        CASE(7) CASE(8)
#endif
    }
}

/* Scales a row's sums, rounds them to bf16 and writes them to `out`. */
static inline void put_row(const product *all, int64_t m, int64_t column, const float *sums) {
    put_scaled(sums, all->scale + column, all->bias + column, PANEL, all->N - column, all->out, all->is_wide,
               m * all->N + column);
}

/* Multiplies up to BLOCK_ROWS rows, from `first` on, with one panel. */
static void multiply_block(const product *all, int64_t first, int64_t rows, int64_t column, float *sums) {
    for (int64_t m = 0; m < rows; m++)
        for (int n = 0; n < PANEL; n++) sums[m * PANEL + n] = all->start[first + m];
    int64_t most = rows > TILE && KEPT ? KEPT : TILE, tiles = (rows + most - 1) / most;
    int64_t each = (rows + tiles - 1) / tiles;
    int64_t share = rows < FETCHED_ROWS ? 0 : (FEW_GROUPS + tiles - 1) / tiles;
    for (int64_t g = 0; g < all->G; g += FEW_GROUPS) {
        int64_t count = all->G - g < FEW_GROUPS ? all->G - g : FEW_GROUPS;
        const int8_t *weights = all->panels + (column * all->G + g * PANEL) * GROUP;
        ahead next = {weights + FEW_GROUPS * GROUP * PANEL, share};
        for (int64_t m = 0; m < rows; m += each, next.from += share * GROUP * PANEL) {
            int64_t row = g * all->M + first + m;
            add_groups_to(rows - m < each ? rows - m : each, all->steps + row * GROUP, all->units + row, all->M, count,
                          weights, next, sums + m * PANEL);
        }
    }
    for (int64_t m = 0; m < rows; m++) put_row(all, first + m, column, sums + m * PANEL);
}

static void multiply_some(void *context, int64_t first, int64_t end, int seat) {
    const product *all = context;
    for (int64_t p = first; p < end; p++)
        for (int64_t m = 0; m < all->M; m += BLOCK_ROWS)
            multiply_block(all, m, all->M - m < BLOCK_ROWS ? all->M - m : BLOCK_ROWS, p * PANEL,
                           all->sums + seat * all->sums_size);
}

const char *octavo_integer_arithmetic(void) { return ARITHMETIC; }

/* out = rounded(x) @ w.T * scale + bias. x: [M, K]; out: [M, N] in bf16, or the same values in fp32 if is_wide; scale,
 * bias: fp32, padded to whole panels. Returns 0, or 1 if memory runs out. */
int octavo_matmul_int8(const bf16 *x, const int8_t *panels, const float *scale, const float *bias, void *out, int is_wide,
                       int64_t M, int64_t N, int64_t K, int num_threads) {
    int64_t G = (K + GROUP - 1) / GROUP, cells = (M * G + 15) / 16 * 16, rows = (M + 15) / 16 * 16; /* whole lines */
    int64_t sums_size = (M < BLOCK_ROWS ? M : BLOCK_ROWS) * PANEL;
    size_t floats = (size_t)(cells + rows + num_threads * sums_size);
    int8_t *steps = aligned_alloc(64, (size_t)(cells * GROUP) + floats * sizeof(float));
    if (!steps) return 1;
    float *units = (float *)(steps + cells * GROUP), *start = units + cells;
    product all = {x, panels, scale, bias, out, is_wide, M, N, K, G, steps, units, start, start + rows, sums_size};
    team_run(round_some, &all, M, M * K < ENOUGH ? 1 : num_threads);
    team_run(multiply_some, &all, (N + PANEL - 1) / PANEL, num_threads);
    free(steps);
    return 0;
}

#else

/* This CPU has no such instructions. */
const char *octavo_integer_arithmetic(void) { return ""; }

int octavo_matmul_int8(const bf16 *x, const int8_t *panels, const float *scale, const float *bias, void *out, int is_wide,
                       int64_t M, int64_t N, int64_t K, int num_threads) {
    (void)x, (void)panels, (void)scale, (void)bias, (void)out, (void)is_wide, (void)M, (void)N, (void)K;
    (void)num_threads;
    return 1;
}

#endif
