/* Rows times a panel of weights in AMX tiles, used by matmul.c on CPUs that have them. They are faster even for one
 * row, with tiles of one row. Must not know: threads, how many panels there are.
 */

#ifndef OCTAVO_PANELS_H
#define OCTAVO_PANELS_H

#include "tiles_amx.h"
#include "vectors.h"

#define ARITHMETIC "AMX"
#define FEW BLOCK_ROWS /* up to so many rows, integers are widened as they are read */
#define FEW_ROWS (2 * BLOCK_ROWS) /* up to so many rows are read in place, with one panel after another */

/* More rows are first laid out in the order of tiles, and a block of them is multiplied with TOGETHER panels, so that
 * it is loaded into the L1 cache once for all of them. At most PIECE inputs are processed at a time, so that the
 * panels' weights for them fit in the L2 cache; partial sums of up to SLAB rows wait there until the last piece. The
 * first NEAR inputs of a block stay in the L1 cache. */
#define TOGETHER 8
#define PIECE 1024
#define SLAB 512
#define NEAR 512

static inline int64_t up_to_whole(int64_t x, int64_t of) { return (x + of - 1) / of * of; }

static inline int wants_layout(int64_t M, int is_int8) { return M > (is_int8 ? FEW : FEW_ROWS); }

static inline int can_gate(int64_t M, int64_t I) { return wants_layout(M, 0) && I % PANEL == 0; }

static inline int64_t laid_out_bytes(int64_t M, int64_t K) {
    return up_to_whole(M, BLOCK_ROWS) * up_to_whole(K, TILE_INPUTS) * (int64_t)sizeof(bf16);
}

/* Copies blocks of rows to [K / TILE_INPUTS, BLOCK_ROWS, TILE_INPUTS], padded with zeros beyond K and M. */
static void lay_out_blocks(void *context, int64_t first, int64_t end, int seat) {
    const product *all = context;
    int64_t K = all->K, size = up_to_whole(K, TILE_INPUTS) * BLOCK_ROWS;
    (void)seat;
    for (int64_t row = first * BLOCK_ROWS; row < end * BLOCK_ROWS; row++) {
        bf16 *to = all->laid_out + row / BLOCK_ROWS * size + row % BLOCK_ROWS * TILE_INPUTS;
        for (int64_t k = 0; k < K; k += TILE_INPUTS, to += BLOCK_ROWS * TILE_INPUTS) {
            __mmask32 is_there = row >= all->M ? 0 : K - k < TILE_INPUTS ? (__mmask32)((1u << (K - k)) - 1) : ~0u;
            _mm512_store_si512(to, _mm512_maskz_loadu_epi16(is_there, all->x + row * K + k));
        }
    }
}

static void lay_out_rows(product *all, int num_threads) {
    team_run(lay_out_blocks, all, (all->M + BLOCK_ROWS - 1) / BLOCK_ROWS, num_threads);
}

static inline void begin_panels(int64_t M) { tiles_begin(M < BLOCK_ROWS ? M : BLOCK_ROWS); }

static inline void end_panels(void) { tiles_end(); }

/* Number of panels in a job: as many as possible, since every job reads all rows, while each thread gets the same
 * number of jobs. */
static inline int64_t panels_together(const product *all, int64_t num_panels, int num_threads) {
    int64_t most = all->ups ? TOGETHER / 2 : TOGETHER, num_jobs = up_to_whole((num_panels + most - 1) / most, num_threads);
    return (num_panels + num_jobs - 1) / num_jobs;
}

/* Bytes that a thread needs for the partial sums of `count` panels; 0 if there is only one piece. */
static inline int64_t waiting_bytes(int64_t K, int64_t count) {
    return K > PIECE ? count * SLAB * PANEL * (int64_t)sizeof(float) : 0;
}

static inline void put_rows(const float *sums, int64_t rows, int64_t m, const target *to) {
    for (int64_t r = 0; r < rows; r++) {
        put(to, m + r, 0, _mm512_load_ps(sums + r * PANEL));
        put(to, m + r, 16, _mm512_load_ps(sums + r * PANEL + 16));
    }
}

/* Up to FEW_ROWS rows times panel p, which is read from memory for the first block of rows and then from caches. */
static void times_panel(const product *all, int64_t p) {
    int64_t M = all->M, K = all->K;
    float sums[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    tile_operand w = {(const bf16 *)all->panels + p * PANEL * K, 4 * PANEL, 2 * TILE_INPUTS * PANEL};
    target to = target_of(all, p);
    for (int64_t m = 0; m < M; m += BLOCK_ROWS) {
        int64_t rows = M - m < BLOCK_ROWS ? M - m : BLOCK_ROWS, is_uneven = M > BLOCK_ROWS && M % BLOCK_ROWS;
        tile_operand x = {all->x + m * K, 2 * K, 2 * TILE_INPUTS};
        if (is_uneven) tiles_begin(rows);
        if (m && rows <= TILE_ROWS) sum_tiles(0, 0, 0, 0, 0, x, rows, w, K, sums, PANEL);
        else if (m) sum_tiles(1, 0, 0, 0, 0, x, rows, w, K, sums, PANEL);
        else if (rows <= TILE_ROWS) sum_tiles(0, 1, 0, 0, 0, x, rows, w, K, sums, PANEL);
        else sum_tiles(1, 1, 0, 0, 0, x, rows, w, K, sums, PANEL);
        put_rows(sums, rows, m, &to);
    }
}

/* `put_rows` of silu(gate) * up, from the sums of a gate's panel and its up's, which are rounded as in separate
 * products. */
static inline void put_gated_rows(const float *gate, const float *up, int64_t rows, int64_t m, const target *to,
                                  const target *to_up) {
    bf16 *out = (bf16 *)to->out + m * to->N + to->column;
    for (int64_t r = 0; r < rows; r++, out += to->N)
        for (int i = 0; i < PANEL; i += LANES) {
            vec g = (vec)wide_of(rounded(to, i, _mm512_load_ps(gate + r * PANEL + i)));
            vec u = (vec)wide_of(rounded(to_up, i, _mm512_load_ps(up + r * PANEL + i)));
            narrow(out + i, round_bf16(silu(g)) * u);
        }
}

/* Multiplies `inputs` inputs of a block of rows that are laid out, from input k on, with a panel. is_far: see
 * sum_tiles. */
static inline void sum_block(tile_operand x, const bf16 *panel, int64_t k, int64_t inputs, int is_far, float *sums) {
    tile_operand w = {panel + k * PANEL, 4 * PANEL, 2 * TILE_INPUTS * PANEL};
    if (k && is_far) sum_tiles(1, 1, 1, NEAR, 0, x, BLOCK_ROWS, w, inputs, sums, PANEL);
    else if (k) sum_tiles(1, 0, 1, NEAR, 0, x, BLOCK_ROWS, w, inputs, sums, PANEL);
    else if (is_far) sum_tiles(1, 1, 0, NEAR, 0, x, BLOCK_ROWS, w, inputs, sums, PANEL);
    else sum_tiles(1, 0, 0, NEAR, 0, x, BLOCK_ROWS, w, inputs, sums, PANEL);
}

/* Multiplies inputs k to k + inputs - 1 of the block of rows from m on with `count` panels, the first of which is the
 * product's panel p, and with the ups that belong to them. */
static void block_times_panels(const product *all, const bf16 *panels, int64_t p, int64_t count, int64_t m, int64_t k,
                               int64_t inputs, float *waiting) {
    int64_t M = all->M, K = all->K, ups = all->ups, rows = M - m < BLOCK_ROWS ? M - m : BLOCK_ROWS;
    float here[2][BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    const bf16 *block = all->laid_out + m * up_to_whole(K, TILE_INPUTS) + k * BLOCK_ROWS;
    tile_operand x = {block, 2 * TILE_INPUTS, 2 * TILE_INPUTS * BLOCK_ROWS};
    int is_far = !m && !all->is_int8, is_last = k + inputs == K;
    for (int64_t i = 0; i < count; i++) {
        float *at = waiting + ((ups ? 2 * i : i) * SLAB + m % SLAB) * PANEL;
        float *sums = K > PIECE ? at : here[0], *up_sums = K > PIECE ? at + SLAB * PANEL : here[1];
        target to = target_of(all, p + i);
        sum_block(x, panels + i * K * PANEL, k, inputs, is_far, sums);
        if (is_last && !ups) put_rows(sums, rows, m, &to);
        if (!ups) continue;
        target to_up = target_of(all, p + i + ups);
        sum_block(x, panels + (i + ups) * K * PANEL, k, inputs, is_far, up_sums);
        if (is_last) put_gated_rows(sums, up_sums, rows, m, &to, &to_up);
    }
}

/* All rows, laid out, times `count` panels. waiting: memory of `waiting_bytes`. */
static void times_together(const product *all, const bf16 *panels, int64_t p, int64_t count, float *waiting) {
    int64_t M = all->M, K = all->K, num_pieces = (K + PIECE - 1) / PIECE;
    int64_t piece = up_to_whole((K + num_pieces - 1) / num_pieces, TILE_INPUTS);
    for (int64_t slab = 0; slab < M; slab += SLAB)
        for (int64_t k = 0; k < K; k += piece)
            for (int64_t m = slab; m < M && m < slab + SLAB; m += BLOCK_ROWS)
                block_times_panels(all, panels, p, count, m, k, K - k < piece ? K - k : piece, waiting);
}

/* All rows times panels first to end - 1. waiting: memory of `waiting_bytes`. */
static void times_panels(const product *all, int64_t first, int64_t end, void *waiting) {
    for (int64_t p = first; !all->laid_out && p < end; p++) times_panel(all, p);
    for (int64_t p = first, count; all->laid_out && p < end; p += count) {
        count = end - p < all->together ? end - p : all->together;
        times_together(all, (const bf16 *)all->panels + p * PANEL * all->K, p, count, waiting);
    }
}

/* More rows than FEW times panel p, whose integers were widened. waiting: memory of `waiting_bytes` for one panel. */
static void times_widened(const product *all, const bf16 *panel, int64_t p, void *waiting) {
    times_together(all, panel, p, 1, waiting);
}

/* Up to FEW rows times integer panel p. */
static void times_integers(const product *all, int64_t p) {
    int64_t M = all->M, K = all->K;
    float sums[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    tile_operand x = {all->x, 2 * K, 2 * TILE_INPUTS};
    tile_operand w = {(const bf16 *)((const int8_t *)all->panels + p * PANEL * K), 2 * PANEL, TILE_INPUTS * PANEL};
    if (M <= TILE_ROWS) sum_tiles(0, 1, 0, 0, widen_panel, x, M, w, K, sums, PANEL);
    else sum_tiles(1, 1, 0, 0, widen_panel, x, M, w, K, sums, PANEL);
    target to = target_of(all, p);
    put_rows(sums, M, 0, &to);
}

#endif
