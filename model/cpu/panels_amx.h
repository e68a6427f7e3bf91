/* Rows times a panel of weights in the tiles of AMX: what matmul.c is made of where there are some. They are the faster way
 * for one row, too, whose tiles are of one row. Must not know: threads, how many panels there are.
 */

#ifndef OCTAVO_PANELS_H
#define OCTAVO_PANELS_H

#include "tiles_amx.h"

#define ARITHMETIC "AMX"
#define FEW BLOCK_ROWS /* rows for which integers are widened as they come */

/* A block of rows is multiplied with some panels together, as long as all of them fit the second cache. With more inputs, a
 * piece of these of up to SLAB rows does, and sums wait until the last piece. */
#define TOGETHER 3
#define MOST_INPUTS 6144
#define PIECE 896
#define SLAB 512

static inline void begin_panels(int64_t M) { tiles_begin(M < BLOCK_ROWS ? M : BLOCK_ROWS); }

static inline void end_panels(void) { tiles_end(); }

/* What a seat needs for the sums that wait; 0 where rows fit as they are. */
static inline int64_t waiting_bytes(int64_t M, int64_t K) {
    return M > BLOCK_ROWS && K > MOST_INPUTS ? TOGETHER * SLAB * PANEL * (int64_t)sizeof(float) : 0;
}

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

/* One piece of one panel times `slab` rows from row m0 on, whose sums wait in [SLAB, PANEL] until the last piece. */
static void piece_of_panel(const product *all, const bf16 *panel, int64_t k, int64_t m0, int64_t slab, const target *to,
                           float *sums) {
    int64_t K = all->K, inputs = K - k < PIECE ? K - k : PIECE;
    tile_operand w = {panel + k * PANEL, 4 * PANEL};
    for (int64_t m = 0; m < slab; m += BLOCK_ROWS) {
        int64_t rows = slab - m < BLOCK_ROWS ? slab - m : BLOCK_ROWS;
        tile_operand x = {all->x + (m0 + m) * K + k, 2 * K};
        float *at = sums + m * PANEL;
        if (!k) memset(at, 0, BLOCK_ROWS * PANEL * sizeof(float));
        if (rows < BLOCK_ROWS) tiles_begin(rows);
        if (rows <= TILE_ROWS) sum_tiles(0, 0, 1, 0, x, rows, w, inputs, at, PANEL);
        else sum_tiles(1, 0, 1, 0, x, rows, w, inputs, at, PANEL);
        if (rows < BLOCK_ROWS) tiles_begin(BLOCK_ROWS);
        if (k + inputs == K) put_rows(at, rows, m0 + m, to);
    }
}

/* All rows times panels first to end - 1. waiting: of `waiting_bytes`. */
static void times_panels(const product *all, int64_t first, int64_t end, void *waiting) {
    int64_t M = all->M, K = all->K;
    for (int64_t p = first; p < end; p += TOGETHER) {
        const bf16 *panels = (const bf16 *)all->panels + p * PANEL * K;
        int64_t count = end - p < TOGETHER ? end - p : TOGETHER;
        if (!waiting) times_together(all, panels, p, count, 1);
        for (int64_t m = 0; waiting && m < M; m += SLAB)
            for (int64_t k = 0; k < K; k += PIECE)
                for (int64_t i = 0; i < count; i++) {
                    target to = target_of(all, p + i);
                    float *sums = (float *)waiting + i * SLAB * PANEL;
                    piece_of_panel(all, panels + i * K * PANEL, k, m, M - m < SLAB ? M - m : SLAB, &to, sums);
                }
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
