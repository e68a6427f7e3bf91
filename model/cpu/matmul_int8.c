/* Products of 8-bit integers: weights with a scale per output, inputs rounded here, each GROUP of a row by a scale of its own.
 *
 * With VNNI, AVX-512's or AVX's own, four products and their sum, a dot, are one instruction. It takes one factor as
 * unsigned, so weights are moved up by 128, and what that adds is taken off where sums begin. Without VNNI a sum of two
 * products must fit 16 bits, so magnitudes of weights (to 127) meet inputs with the weights' signs. Dots of a group are
 * exact, and groups are added in fp32 in order: a row has the same bits in any batch.
 *
 * Weights lie in panels of PANEL outputs, four inputs together: [N / PANEL, K / 4, PANEL, 4]. Rounded inputs are laid out so
 * that a panel streams by once for a block of rows: [K / GROUP, M, GROUP].
 *
 * Legend: M rows · N outputs · K inputs · G groups, the last one filled up with zeros. Must not know: torch, Python.
 */

#include "team.h"
#include "vectors.h"

#if defined(__AVX2__) && (defined(__AVX512BW__) || !defined(__AVX512F__))

#define PANEL 32
#define GROUP 32
#define FEW_GROUPS 8       /* whose weights stay in the first cache while a block of rows meets them */
#define BLOCK_ROWS 112     /* whose sums and inputs stay there, too */
#define AHEAD 4096         /* bytes of weights that are fetched before they are wanted */
#define ENOUGH (64 * 1024) /* inputs that are worth sharing the rounding of */

#ifdef __AVX512BW__
typedef __m512i bytes;
#define LOAD(from) _mm512_loadu_si512(from)
#define SPLAT(four) _mm512_set1_epi32(four)
#define TO_FLOATS(x) (vec)_mm512_cvtepi32_ps(x)
#else
typedef __m256i bytes;
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(from))
#define SPLAT(four) _mm256_set1_epi32(four)
#define TO_FLOATS(x) (vec)_mm256_cvtepi32_ps(x)
#endif

static inline bytes four_bytes_at(const void *from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    return SPLAT(four);
}

/* Sums are added to by hand: of its own functions for it GCC 12 keeps them in memory. TILE: rows whose dots, two registers
 * each, leave registers for weights and inputs. */
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512BW__))

#define ARITHMETIC "VNNI"
#define RAISED 128
#ifdef __AVX512VNNI__
#define TILE 14
#else
#define TILE 6
#endif
typedef bytes factor;

static inline factor factor_at(const int8_t *from) { return LOAD(from) ^ SPLAT((int32_t)0x80808080u); }

static inline bytes add_dots(bytes sums, factor w, bytes x) {
#ifdef __AVX512VNNI__
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(x));
#else
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(w), "x"(x));
#endif
    return sums;
}

#else

#define RAISED 0
#ifdef __AVX512BW__
#define ARITHMETIC "AVX-512"
#define TILE 12
typedef struct {
    bytes magnitude;
    __mmask64 is_negative;
} factor;

static inline factor factor_at(const int8_t *from) {
    bytes w = LOAD(from);
    return (factor){_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}

static inline bytes add_dots(bytes sums, factor w, bytes x) {
    bytes pairs, turned = _mm512_mask_sub_epi8(x, w.is_negative, _mm512_setzero_si512(), x);
    __asm__("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
            : "+v"(sums), "=&v"(pairs) : "v"(w.magnitude), "v"(turned), "v"(_mm512_set1_epi16(1)));
    return sums;
}
#else
#define ARITHMETIC "AVX2"
#define TILE 5
typedef struct {
    bytes magnitude, sign;
} factor;

static inline factor factor_at(const int8_t *from) {
    bytes w = LOAD(from);
    return (factor){_mm256_abs_epi8(w), w};
}

static inline bytes add_dots(bytes sums, factor w, bytes x) {
    bytes pairs;
    __asm__("vpsignb %3, %4, %1\n\tvpmaddubsw %1, %2, %1\n\tvpmaddwd %5, %1, %1\n\tvpaddd %1, %0, %0"
            : "+x"(sums), "=&x"(pairs) : "x"(w.magnitude), "x"(w.sign), "x"(x), "x"(_mm256_set1_epi16(1)));
    return sums;
}
#endif
#endif

typedef struct {
    const bf16 *x;
    const int8_t *panels;
    const float *scale, *bias;
    void *out;
    int is_wide;
    int64_t M, N, K, G;
    int8_t *steps; /* rounded inputs: [G, M, GROUP] */
    float *units; /* [G, M] */
    float *start; /* [M]: what sums begin with */
    float *sums;  /* of each seat: [sums_size] */
    int64_t sums_size;
} product;

/* ---------------------------------------------------------------- inputs */

static inline uint16_t largest_magnitude(const bf16 *from) {
    const __m256i no_sign = _mm256_set1_epi16(0x7fff);
    __m256i a = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)from), no_sign);
    __m256i b = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(from + 16)), no_sign);
    __m256i more = _mm256_max_epi16(a, b);
    __m128i most = _mm_max_epi16(_mm256_castsi256_si128(more), _mm256_extracti128_si256(more, 1));
    __m128i least = _mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(-1)));
    return (uint16_t)~_mm_extract_epi16(least, 0);
}

/* 16 inputs times `by`, to the nearest integers. */
static inline __m256i words_of(const bf16 *from, float by) {
    const float middle = 12582912.0f; /* 1.5 * 2^23: the integer is in the low bits of the sum */
#if LANES == 16
    return _mm512_cvtepi32_epi16((__m512i)((ivec)(widen(from) * by + middle) - 0x4b400000));
#else
    ivec first = (ivec)(widen(from) * by + middle) - 0x4b400000;
    ivec second = (ivec)(widen(from + 8) * by + middle) - 0x4b400000;
    return _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)first, (__m256i)second), 0xd8);
#endif
}

static inline int32_t total_of(__m256i words) {
    __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

/* GROUP inputs in units of a 127th of their largest magnitude, which is returned. In the order of bits infinity is larger
 * than any number, and what is no number larger still: of either the unit, and so the row, is none. */
static inline float round_group(const bf16 *from, int8_t *to, int32_t *total) {
    float most = widen1(largest_magnitude(from)), by = most > 1e-30f ? 127.0f / most : 0;
    __m256i first = words_of(from, by), second = words_of(from + 16, by);
    *total = RAISED ? total_of(_mm256_add_epi16(first, second)) : 0;
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(first, second), 0xd8);
    _mm256_storeu_si256((__m256i *)to, packed);
    return most / 127.0f;
}

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

#define WHOLE (PANEL / LANES) /* registers of a panel's outputs */
#define KEPT (LANES == 16 ? 7 : 0) /* rows whose sums over groups are registers, too: fastest per row */
#define FEW (2 * TILE)             /* rows that read weights fewer times in tiles of TILE: faster while that bounds them */

/* to: [rows, PANEL] += rows of `count` groups, stride apart, times `spread` registers of a panel's outputs. ahead: what is
 * fetched meanwhile. rows, spread: constants where this is called, so that dots and sums are registers. */
static inline __attribute__((always_inline)) void add_outputs(const int rows, const int spread, const int8_t *steps,
                                                              const float *units, int64_t stride, int64_t count,
                                                              const int8_t *weights, const int8_t *ahead,
                                                              float *to) {
    const int is_kept = rows <= KEPT;
    vec sums[TILE][WHOLE];
    for (int m = 0; is_kept && m < rows; m++)
        for (int j = 0; j < spread; j++) memcpy(&sums[m][j], to + m * PANEL + j * LANES, sizeof(vec));
    for (int64_t g = 0; g < count; g++) {
        bytes dots[TILE][WHOLE];
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < spread; j++) dots[m][j] = SPLAT(0);
        for (int q = 0; q < GROUP / 4; q++) {
            factor w[WHOLE];
            for (int i = 0; i < 4 * spread * LANES; i += 64) __builtin_prefetch(ahead + 4 * q * PANEL + i, 0, 2);
            for (int j = 0; j < spread; j++) w[j] = factor_at(weights + 4 * (q * PANEL + j * LANES));
            for (int m = 0; m < rows; m++) {
                bytes x = four_bytes_at(steps + m * GROUP + 4 * q);
                for (int j = 0; j < spread; j++) dots[m][j] = add_dots(dots[m][j], w[j], x);
            }
        }
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < spread; j++) {
                vec sum = sums[m][j];
                if (!is_kept) memcpy(&sum, to + m * PANEL + j * LANES, sizeof sum);
                sum += TO_FLOATS(dots[m][j]) * units[m];
                if (is_kept) sums[m][j] = sum;
                else memcpy(to + m * PANEL + j * LANES, &sum, sizeof sum);
            }
        steps += stride * GROUP, units += stride, weights += GROUP * PANEL, ahead += GROUP * PANEL;
    }
    for (int m = 0; is_kept && m < rows; m++)
        for (int j = 0; j < spread; j++) memcpy(to + m * PANEL + j * LANES, &sums[m][j], sizeof(vec));
}

static inline __attribute__((always_inline)) void add_groups(const int rows, const int8_t *steps, const float *units,
                                                             int64_t stride, int64_t count, const int8_t *weights,
                                                             const int8_t *ahead, float *to) {
    const int spread = rows == 1 ? WHOLE : 2;
    for (int64_t n = 0; n < PANEL; n += spread * LANES)
        add_outputs(rows, spread, steps, units, stride, count, weights + 4 * n, ahead + 4 * n, to + n);
}

/* Up to TILE rows. */
static void add_groups_to(int64_t rows, const int8_t *steps, const float *units, int64_t stride, int64_t count,
                          const int8_t *weights, const int8_t *ahead, float *to) {
    switch (rows) {
#define CASE(n) case n: add_groups(n, steps, units, stride, count, weights, ahead, to); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#if TILE >= 6
        CASE(6)
#endif
#if TILE >= 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#if TILE >= 14
        CASE(13) CASE(14)
#endif
    }
}

/* A row's sums, scaled and rounded to bf16, to where they belong. */
static inline void put_row(const product *all, int64_t m, int64_t column, const float *sums) {
    put_scaled(sums, all->scale + column, all->bias + column, PANEL, all->N - column, all->out, all->is_wide,
               m * all->N + column);
}

/* Up to BLOCK_ROWS rows from `first` on times one panel. */
static void multiply_block(const product *all, int64_t first, int64_t rows, int64_t column, float *sums) {
    for (int64_t m = 0; m < rows; m++)
        for (int n = 0; n < PANEL; n++) sums[m * PANEL + n] = all->start[first + m];
    int64_t most = rows > FEW && KEPT ? KEPT : TILE, tiles = (rows + most - 1) / most;
    int64_t each = (rows + tiles - 1) / tiles;
    for (int64_t g = 0; g < all->G; g += FEW_GROUPS) {
        int64_t count = all->G - g < FEW_GROUPS ? all->G - g : FEW_GROUPS;
        const int8_t *weights = all->panels + (column * all->G + g * PANEL) * GROUP;
        for (int64_t m = 0; m < rows; m += each) {
            int64_t row = g * all->M + first + m;
            add_groups_to(rows - m < each ? rows - m : each, all->steps + row * GROUP, all->units + row, all->M, count,
                          weights, m ? weights : weights + AHEAD, sums + m * PANEL);
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

/* out = rounded(x) @ w.T * scale + bias. x: [M, K], out: [M, N] of bf16, or of fp32 with the same values where is_wide;
 * scale, bias: fp32, padded to whole panels. Returns 0, or 1 without memory. */
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

/* There are no such instructions. */
const char *octavo_integer_arithmetic(void) { return ""; }

int octavo_matmul_int8(const bf16 *x, const int8_t *panels, const float *scale, const float *bias, void *out, int is_wide,
                       int64_t M, int64_t N, int64_t K, int num_threads) {
    (void)x, (void)panels, (void)scale, (void)bias, (void)out, (void)is_wide, (void)M, (void)N, (void)K;
    (void)num_threads;
    return 1;
}

#endif
