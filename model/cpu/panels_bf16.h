/* Rows times a panel of weights with AVX512-BF16, used by matmul.c on CPUs without AMX. A tile of up to TILE rows keeps
 * its sums in registers. Must not know: threads, how many panels there are.
 */

#ifndef OCTAVO_PANELS_H
#define OCTAVO_PANELS_H

#define ARITHMETIC "AVX512-BF16"
#define TILE 14 /* two sums per row, two registers of weights and one of inputs: 31 of the 32 registers */
#define FEWEST 4 /* the fewest rows of a tile that keep the processor busy: with fewer, additions wait for each other */
#define AHEAD (128 * PANEL) /* how far ahead weights are prefetched if the hardware prefetcher is too late */

/* Up to so many rows, widening the integers as they are read is cheaper than widening them once for all rows. */
#define FEW (2 * TILE)

/* How a panel is read. PAIRS_FETCHED: with prefetches, for 8 rows and more if it is in memory; slower for fewer rows,
 * and from caches. */
enum format { PAIRS, PAIRS_FETCHED, INTEGERS };
#define FETCHED_ROWS 8

static inline __m512bh pair_of(const bf16 *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

static inline wide_pairs weights_at(const void *panel, const enum format format, int64_t index) {
    if (format == INTEGERS) {
        const int8_t *integers = (const int8_t *)panel + index;
        _mm_prefetch(integers + AHEAD, _MM_HINT_T1);
        return widened(integers);
    }
    const bf16 *from = (const bf16 *)panel + index;
    if (format == PAIRS_FETCHED) {
        _mm_prefetch(from + AHEAD, _MM_HINT_T1);
        _mm_prefetch(from + AHEAD + PANEL, _MM_HINT_T1);
    }
    return (wide_pairs){(__m512bh)_mm512_loadu_si512(from), (__m512bh)_mm512_loadu_si512(from + PANEL)};
}

/* Rows from m on times a panel. rows, format: compile-time constants in each call, so that the sums stay in
 * registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const enum format format, const bf16 *x,
                                                       int64_t K, const void *panel, int64_t m, const target *to) {
    __m512 low[TILE], high[TILE];
    for (int r = 0; r < rows; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 2) {
        wide_pairs w = weights_at(panel, format, k * PANEL);
        for (int r = 0; r < rows; r++) {
            __m512bh pair = pair_of(x + (m + r) * K + k);
            low[r] = _mm512_dpbf16_ps(low[r], w.low, pair);
            high[r] = _mm512_dpbf16_ps(high[r], w.high, pair);
        }
    }
    for (int r = 0; r < rows; r++) {
        if (format == INTEGERS) reorder(&low[r], &high[r]);
        put(to, m + r, 0, low[r]);
        put(to, m + r, 16, high[r]);
    }
}

/* Up to TILE rows times one panel: few rows, or a panel that earlier rows have brought into the caches. */
static void rows_times_panel(int64_t rows, const bf16 *x, int64_t K, const void *panel, int64_t m, const target *to) {
    switch (rows) {
#define CASE(n) case n: tile(n, PAIRS, x, K, panel, m, to); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
    }
}

/* FETCHED_ROWS to TILE rows times one panel that is in memory. */
static void rows_times_far_panel(int64_t rows, const bf16 *x, int64_t K, const void *panel, const target *to) {
    switch (rows) {
#define FAR_CASE(n) case n: tile(n, PAIRS_FETCHED, x, K, panel, 0, to); break;
        FAR_CASE(8) FAR_CASE(9) FAR_CASE(10) FAR_CASE(11) FAR_CASE(12) FAR_CASE(13) FAR_CASE(14)
    }
}

static void few_rows_times_int8(int64_t rows, const bf16 *x, int64_t K, const void *panel, int64_t m,
                                const target *to) {
    switch (rows) {
#define FEW_CASE(n) case n: tile(n, INTEGERS, x, K, panel, m, to); break;
        FEW_CASE(1) FEW_CASE(2) FEW_CASE(3) FEW_CASE(4) FEW_CASE(5) FEW_CASE(6)
        FEW_CASE(7) FEW_CASE(8) FEW_CASE(9) FEW_CASE(10) FEW_CASE(11) FEW_CASE(12) FEW_CASE(13) FEW_CASE(14)
    }
}

/* Number of rows of the tile that starts at row m of M. */
static inline int64_t rows_of_tile(int64_t m, int64_t M) {
    int64_t left = M - m, are_alike = m && left > TILE && left < TILE + FEWEST; /* the last two tiles share the rows */
    return are_alike ? (left + 1) / 2 : left < TILE ? left : TILE;
}

/* Rows are read in place, and there are no partial sums. */
static inline int wants_layout(int64_t M, int is_int8) { return (void)M, (void)is_int8, 0; }

static inline int can_gate(int64_t M, int64_t I) { return (void)M, (void)I, 0; }

static inline int64_t panels_together(const product *all, int64_t num_panels, int num_threads) {
    return (void)all, (void)num_panels, (void)num_threads, 1;
}

static inline int64_t laid_out_bytes(int64_t M, int64_t K) { return (void)M, (void)K, 0; }

static inline void lay_out_rows(product *all, int num_threads) { (void)all, (void)num_threads; }

static inline int64_t waiting_bytes(int64_t K, int64_t count) { return (void)K, (void)count, 0; }

static inline void begin_panels(int64_t M) { (void)M; }

static inline void end_panels(void) {}

/* All rows times panel p, which is in memory if is_far, else in a cache. */
static void times_panel(const product *all, const bf16 *panel, int64_t p, int is_far) {
    target to = target_of(all, p);
    for (int64_t m = 0, rows; m < all->M; m += rows) {
        rows = rows_of_tile(m, all->M);
        if (is_far && m == 0 && rows >= FETCHED_ROWS) rows_times_far_panel(rows, all->x, all->K, panel, &to);
        else rows_times_panel(rows, all->x, all->K, panel, m, &to);
    }
}

/* All rows times panels first to end - 1. */
static void times_panels(const product *all, int64_t first, int64_t end, void *waiting) {
    (void)waiting;
    for (int64_t p = first; p < end; p++) times_panel(all, (const bf16 *)all->panels + p * PANEL * all->K, p, 1);
}

/* All rows times panel p, whose integers were widened. */
static void times_widened(const product *all, const bf16 *panel, int64_t p, void *waiting) {
    (void)waiting;
    times_panel(all, panel, p, 0);
}

/* Up to FEW rows times integer panel p. */
static void times_integers(const product *all, int64_t p) {
    const int8_t *panel = (const int8_t *)all->panels + p * PANEL * all->K;
    target to = target_of(all, p);
    for (int64_t m = 0, rows; m < all->M; m += rows) {
        rows = rows_of_tile(m, all->M);
        few_rows_times_int8(rows, all->x, all->K, panel, m, &to);
    }
}

#endif
