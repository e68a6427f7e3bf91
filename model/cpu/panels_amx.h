/* Rows times a panel of weights in the tiles of AMX: what matmul.c is made of where there are some. They are the faster way
 * for one row, too, whose tiles are of one row. Must not know: threads, how many panels there are.
 */

#ifndef OCTAVO_PANELS_H
#define OCTAVO_PANELS_H

#include "tiles_amx.h"

#define ARITHMETIC "AMX"
#define FEW BLOCK_ROWS /* rows for which integers are widened as they come */

/* Panels that rows are multiplied with while they are in the second cache: with 4,864 inputs they come from the third. */
#define TOGETHER 3

static inline void begin_panels(int64_t M) { tiles_begin(M < BLOCK_ROWS ? M : BLOCK_ROWS); }

static inline void end_panels(void) { tiles_end(); }

static inline void put_rows(const float *sums, int64_t rows, int64_t m, const target *to) {
    for (int64_t r = 0; r < rows; r++) {
        put(to, m + r, 0, _mm512_load_ps(sums + r * PANEL));
        put(to, m + r, 16, _mm512_load_ps(sums + r * PANEL + 16));
    }
}

static void block_times_panel(const bf16 *x, int64_t rows, int64_t K, const bf16 *panel, int is_far, int64_t m,
                              const target *to) {
    float sums[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    tile_operand x_m = {x + m * K, 2 * K}, w = {panel, 4 * PANEL};
    if (rows <= TILE_ROWS && is_far) sum_tiles(0, 1, 0, 0, x_m, rows, w, K, sums, PANEL);
    else if (rows <= TILE_ROWS) sum_tiles(0, 0, 0, 0, x_m, rows, w, K, sums, PANEL);
    else if (is_far) sum_tiles(1, 1, 0, 0, x_m, rows, w, K, sums, PANEL);
    else sum_tiles(1, 0, 0, 0, x_m, rows, w, K, sums, PANEL);
    put_rows(sums, rows, m, to);
}

/* All rows times `count` panels, of which the first is the product's panel p. */
static void times_together(const product *all, const bf16 *panels, int64_t p, int64_t count, int is_far) {
    int64_t M = all->M, K = all->K, is_uneven = M > BLOCK_ROWS && M % BLOCK_ROWS;
    for (int64_t m = 0; m < M; m += BLOCK_ROWS) {
        int64_t rows = M - m < BLOCK_ROWS ? M - m : BLOCK_ROWS;
        if (is_uneven && rows < BLOCK_ROWS) tiles_begin(rows);
        for (int64_t i = 0; i < count; i++) {
            target to = target_of(all, p + i);
            block_times_panel(all->x, rows, K, panels + i * K * PANEL, is_far && m == 0, m, &to);
        }
    }
    if (is_uneven) tiles_begin(BLOCK_ROWS);
}

/* All rows times panels first to end - 1. */
static void times_panels(const product *all, int64_t first, int64_t end) {
    for (int64_t p = first; p < end; p += TOGETHER) {
        const bf16 *panels = (const bf16 *)all->panels + p * PANEL * all->K;
        times_together(all, panels, p, end - p < TOGETHER ? end - p : TOGETHER, 1);
    }
}

/* All rows times panel p, whose integers were widened. */
static void times_widened(const product *all, const bf16 *panel, int64_t p) { times_together(all, panel, p, 1, 0); }

/* Up to FEW rows times panel p of integers. */
static void times_integers(const product *all, int64_t p) {
    int64_t M = all->M, K = all->K;
    float sums[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    tile_operand x = {all->x, 2 * K}, w = {(const bf16 *)((const int8_t *)all->panels + p * PANEL * K), 2 * PANEL};
    if (M <= TILE_ROWS) sum_tiles(0, 1, 0, widen_panel, x, M, w, K, sums, PANEL);
    else sum_tiles(1, 1, 0, widen_panel, x, M, w, K, sums, PANEL);
    target to = target_of(all, p);
    put_rows(sums, M, 0, &to);
}

#endif
