/* Sums of products in AMX tiles, up to 32 rows times 32 outputs at a time, used by panels_amx.h and spans_bf16.h.
 * Weights are stored as everywhere in this folder, pairs of inputs of 32 outputs together, which suits tiles: the rows
 * of one are every other 64 bytes. Every sum adds the inputs in order. isa.py asks for permission to use tiles.
 * Must not know: scales, where sums go.
 */

#ifndef OCTAVO_TILES_AMX_H
#define OCTAVO_TILES_AMX_H

#include <stdint.h>
#include <string.h>

#define TILE_ROWS 16
#define BLOCK_ROWS (2 * TILE_ROWS)
#define BLOCK_OUTPUTS 32
#define TILE_INPUTS 32
#define TILE_AHEAD 4096 /* how far ahead weights are prefetched, in bytes */

#ifdef OCTAVO_TILES_IN_C /* for tests: the same in plain C, on CPUs without tiles */
#include OCTAVO_TILES_IN_C
#else
/* Inline assembly, since GCC 12 drops a tile configuration that it considers unused. */
#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::)
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, from, step) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"((int64_t)(step)) : "memory")
/* A load that bypasses the L1 cache, which is left to other data. */
#define TILE_PASS(t, from, step) \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t ::"r"(from), "r"((int64_t)(step)) : "memory")
#define TILE_STORE(t, to, step) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(step)) : "memory")
#define TILE_MULTIPLY(sums, x, w) __asm__ volatile("tdpbf16ps %%tmm" #w ", %%tmm" #x ", %%tmm" #sums ::)
#endif

/* The operand of ldtilecfg. Tiles 0 to 3 are sums, rows by outputs; 4 and 5 are rows; 6 and 7 are weights. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config;

/* Call before a thread's first sums, and when the number of rows, at most BLOCK_ROWS, changes. */
static inline void tiles_begin(int64_t rows) {
    tile_config config = {.palette = 1};
    int64_t first = rows < TILE_ROWS ? rows : TILE_ROWS, second = rows - first;
    const int64_t of[8] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
    for (int t = 0; t < 8; t++) config.rows[t] = (uint8_t)of[t], config.bytes[t] = of[t] ? 64 : 0;
    TILE_CONFIGURE(config);
}

/* Call after a thread's last sums: the content of tiles would be saved at every context switch. */
static inline void tiles_end(void) { TILE_RELEASE(); }

/* A matrix of which a block is read. step: bytes from one row to the next or, for weights, from one pair of inputs to
 * the next; next: bytes from TILE_INPUTS inputs to the following ones. */
typedef struct {
    const uint16_t *at;
    int64_t step, next;
} tile_operand;

static inline tile_operand behind(tile_operand x, int64_t bytes) {
    x.at = (const uint16_t *)((const char *)x.at + bytes);
    return x;
}

/* What bypasses the L1 cache. */
enum passing { NOTHING, WEIGHTS, ALL };

static inline __attribute__((always_inline)) void add_step(const int has_second, const enum passing passing, tile_operand x,
                                                           tile_operand w) {
    tile_operand second = behind(x, TILE_ROWS * x.step);
    if (passing == NOTHING) TILE_LOAD(6, w.at, w.step);
    else TILE_PASS(6, w.at, w.step);
    if (passing == ALL) TILE_PASS(4, x.at, x.step);
    else TILE_LOAD(4, x.at, x.step);
    TILE_MULTIPLY(0, 4, 6);
    if (passing == NOTHING) TILE_LOAD(7, w.at + BLOCK_OUTPUTS, w.step);
    else TILE_PASS(7, w.at + BLOCK_OUTPUTS, w.step);
    TILE_MULTIPLY(1, 4, 7);
    if (!has_second) return;
    if (passing == ALL) TILE_PASS(5, second.at, x.step);
    else TILE_LOAD(5, second.at, x.step);
    TILE_MULTIPLY(2, 5, 6);
    TILE_MULTIPLY(3, 5, 7);
}

/* Converts `count` weights that are half as wide to bf16. */
typedef void (*tile_widen)(const int8_t *from, uint16_t *to, int64_t count);

/* Adds the products of inputs k to end - 1, TILE_INPUTS at a time. */
static inline __attribute__((always_inline)) void add_steps(const int has_second, const enum passing passing,
                                                            const int is_far, const tile_widen widen, tile_operand x,
                                                            tile_operand w, int64_t k, int64_t end) {
    const int64_t numbers = TILE_INPUTS * BLOCK_OUTPUTS;
    uint16_t widened[2][TILE_INPUTS * BLOCK_OUTPUTS] __attribute__((aligned(64))); /* alternate: one is still read */
    tile_operand x_k = behind(x, k / TILE_INPUTS * x.next), w_k = behind(w, k / TILE_INPUTS * w.next);
    for (; k < end; k += TILE_INPUTS) {
        if (is_far)
            for (int64_t line = 0; line < numbers * (widen ? 1 : 2); line += 64)
                __builtin_prefetch((const char *)w_k.at + TILE_AHEAD + line, 0, 2);
        if (widen) {
            uint16_t *pairs = widened[k / TILE_INPUTS % 2];
            widen((const int8_t *)w_k.at, pairs, numbers);
            add_step(has_second, passing, x_k, (tile_operand){pairs, 4 * BLOCK_OUTPUTS, 0});
        } else {
            add_step(has_second, passing, x_k, w_k);
        }
        x_k = behind(x_k, x.next), w_k = behind(w_k, w.next);
    }
}

/* sums = x @ w.T over K inputs; with is_more, added to what is there. has_second: more than TILE_ROWS rows. is_far: the
 * weights are in memory, not in a cache. stays: so many inputs of these rows are kept in the L1 cache for the weights
 * that follow, and all else bypasses it (0: nothing bypasses it). widen: converts weights as they are read; 0 if they
 * are bf16. All of these are compile-time constants in each call. sums: rows of `step` floats. */
static inline __attribute__((always_inline)) void sum_tiles(const int has_second, const int is_far, const int is_more,
                                                            const int64_t stays, const tile_widen widen, tile_operand x,
                                                            int64_t rows, tile_operand w, int64_t K, float *sums,
                                                            int64_t step) {
    const int64_t pair_bytes = 4 * BLOCK_OUTPUTS;
    float *second = sums + TILE_ROWS * step;
    int64_t bytes = 4 * step, whole = K - K % TILE_INPUTS;
    if (is_more) {
        TILE_LOAD(0, sums, bytes);
        TILE_LOAD(1, sums + 16, bytes);
        if (has_second) {
            TILE_LOAD(2, second, bytes);
            TILE_LOAD(3, second + 16, bytes);
        }
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (has_second) {
            TILE_ZERO(2);
            TILE_ZERO(3);
        }
    }
    if (stays) {
        add_steps(has_second, WEIGHTS, is_far, widen, x, w, 0, whole < stays ? whole : stays);
        add_steps(has_second, ALL, is_far, widen, x, w, stays, whole);
    } else {
        add_steps(has_second, NOTHING, is_far, widen, x, w, 0, whole);
    }
    if (whole < K) { /* the remaining inputs, padded with zeros */
        uint16_t x_rest[BLOCK_ROWS * TILE_INPUTS] = {0}, w_rest[TILE_INPUTS * BLOCK_OUTPUTS] = {0};
        tile_operand x_k = behind(x, whole / TILE_INPUTS * x.next), w_k = behind(w, whole / TILE_INPUTS * w.next);
        for (int64_t r = 0; r < rows; r++)
            memcpy(x_rest + r * TILE_INPUTS, behind(x_k, r * x.step).at, (size_t)(K - whole) * 2);
        if (widen) widen((const int8_t *)w_k.at, w_rest, (K - whole) * BLOCK_OUTPUTS);
        for (int64_t pair = 0; !widen && pair < (K - whole) / 2; pair++)
            memcpy(w_rest + pair * 2 * BLOCK_OUTPUTS, behind(w_k, pair * w.step).at, (size_t)pair_bytes);
        add_step(has_second, NOTHING, (tile_operand){x_rest, 2 * TILE_INPUTS, 0}, (tile_operand){w_rest, pair_bytes, 0});
    }
    TILE_STORE(0, sums, bytes);
    TILE_STORE(1, sums + 16, bytes);
    if (has_second) {
        TILE_STORE(2, second, bytes);
        TILE_STORE(3, second + 16, bytes);
    }
}

#endif
