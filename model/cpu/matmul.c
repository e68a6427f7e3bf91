/* Products of few or many rows with packed weights, for CPUs with AVX512-BF16, using AMX if there is; matmul_fp32.c is
 * for other CPUs.
 *
 * Weights are stored in panels of PANEL outputs, pairs of inputs together: [N / PANEL, K / 2, PANEL, 2]. The sums of a
 * few rows stay in registers while a panel is read once. Every sum adds the inputs in order, whatever the number of
 * rows and threads, so that a row has the same bits in any batch.
 *
 * Legend: M rows · N outputs (a multiple of PANEL here) · K inputs (even). Must not know: torch, Python.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"

#define PANEL 32

typedef uint16_t bf16;

#ifdef __AVX512BF16__
#include <immintrin.h>

/* ---------------------------------------------------------------- integers
 *
 * Converts -127 to 127 to bf16, exactly. With VBMI, the two bytes of a bf16 are looked up by magnitude: 64 integers in
 * seven instructions. The bytes are interleaved within quarters of a register, so outputs are permuted until `reorder`;
 * without VBMI they are in order. */

/* Pairs of inputs of 32 outputs. */
typedef struct {
    __m512bh low, high;
} wide_pairs;

#ifdef __AVX512VBMI__

#define EXPONENT(i) ((i) >= 64 ? 6 : (i) >= 32 ? 5 : (i) >= 16 ? 4 : (i) >= 8 ? 3 : (i) >= 4 ? 2 : (i) >= 2 ? 1 : 0)
#define BITS(i) ((i) ? (127 + EXPONENT(i)) << 7 | ((i) << (7 - EXPONENT(i)) & 127) : 0)
#define LOW_BYTE(i) (uint8_t)(BITS(i) & 255)
#define HIGH_BYTE(i) (uint8_t)(BITS(i) >> 8)
#define FOUR(byte, i) byte((i)), byte((i) + 1), byte((i) + 2), byte((i) + 3)
#define SIXTEEN(byte, i) FOUR(byte, i), FOUR(byte, (i) + 4), FOUR(byte, (i) + 8), FOUR(byte, (i) + 12)
#define SIXTY_FOUR(byte, i) \
    SIXTEEN(byte, i), SIXTEEN(byte, (i) + 16), SIXTEEN(byte, (i) + 32), SIXTEEN(byte, (i) + 48)

static const uint8_t low_bytes[128] __attribute__((aligned(64))) = {SIXTY_FOUR(LOW_BYTE, 0), SIXTY_FOUR(LOW_BYTE, 64)};
static const uint8_t high_bytes[128] __attribute__((aligned(64))) = {SIXTY_FOUR(HIGH_BYTE, 0), SIXTY_FOUR(HIGH_BYTE, 64)};

static inline wide_pairs widened(const int8_t *from) {
    __m512i x = _mm512_loadu_si512(from), magnitude = _mm512_abs_epi8(x);
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(low_bytes), magnitude, _mm512_load_si512(low_bytes + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(high_bytes), magnitude, _mm512_load_si512(high_bytes + 64));
    high = _mm512_ternarylogic_epi64(high, x, _mm512_set1_epi8(-128), 0xf8); /* high | x & sign */
    return (wide_pairs){(__m512bh)_mm512_unpacklo_epi8(low, high), (__m512bh)_mm512_unpackhi_epi8(low, high)};
}

/* Restores the order of 32 outputs in two registers. */
static inline void reorder(__m512 *low, __m512 *high) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    __m512 lower = _mm512_permutex2var_ps(*low, first, *high);
    *high = _mm512_permutex2var_ps(*low, second, *high);
    *low = lower;
}

#else

static inline __m512bh widened_half(const int8_t *from) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + 16))));
    return _mm512_cvtne2ps_pbh(high, low);
}

static inline wide_pairs widened(const int8_t *from) {
    return (wide_pairs){widened_half(from), widened_half(from + 32)};
}

static inline void reorder(__m512 *low, __m512 *high) { (void)low, (void)high; }

#endif

static inline void widen_panel(const int8_t *from, bf16 *to, int64_t count) {
    for (int64_t i = 0; i < count; i += 2 * PANEL) {
        wide_pairs w = widened(from + i);
        __m512 low = (__m512)w.low, high = (__m512)w.high;
        reorder(&low, &high);
        _mm512_storeu_ps(to + i, low);
        _mm512_storeu_ps(to + i + PANEL, high);
    }
}

/* ---------------------------------------------------------------- products */

typedef struct {
    const bf16 *x;
    const void *panels;
    int is_int8;
    const float *scale, *bias;
    void *out;
    int is_wide;
    int64_t M, N, K;
    int64_t ups; /* panels from a gate's panel to its up's; 0 for a plain product */
    int64_t together; /* panels in a job */
    bf16 *laid_out; /* the rows in the order of tiles; 0 if they are read in place */
    char *scratch; /* per thread: a widened panel (integer weights, more than FEW rows), then partial sums */
    int64_t scratch_bytes;
} product;

/* Where a panel's sums go: into `out` (bf16, or the same values in fp32 if is_wide), whose rows are N apart, from
 * `column` on. width: columns from there to the end of the row, of which a panel fills at most PANEL. scale, bias: the
 * panel's. */
typedef struct {
    const float *scale, *bias;
    void *out;
    int64_t column, N, width;
    int is_wide;
} target;

static inline target target_of(const product *all, int64_t p) {
    int64_t column = p * PANEL;
    return (target){all->scale + column, all->bias + column, all->out, column, all->N, all->N - column, all->is_wide};
}

static inline __m256i rounded(const target *to, int first, __m512 sum) {
    return (__m256i)_mm512_cvtneps_pbh(
        _mm512_fmadd_ps(sum, _mm512_loadu_ps(to->scale + first), _mm512_loadu_ps(to->bias + first)));
}

static inline __m512i wide_of(__m256i half) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16); }

static inline void put(const target *to, int64_t m, int first, __m512 sum) {
    int64_t width = to->width - first, at = m * to->N + to->column + first;
    __mmask16 mask = width >= 16 ? 0xffff : width <= 0 ? 0 : (__mmask16)((1u << width) - 1);
    __m256i half = rounded(to, first, sum);
    if (to->is_wide) {
        _mm512_mask_storeu_epi32((float *)to->out + at, mask, wide_of(half));
    } else {
        _mm256_mask_storeu_epi16((bf16 *)to->out + at, mask, half);
    }
}

#ifdef __AMX_BF16__
#include "panels_amx.h"
#else
#include "panels_bf16.h"
#endif

const char *octavo_arithmetic(void) { return ARITHMETIC; }

static inline int64_t widened_bytes(const product *all) {
    return all->is_int8 && all->M > FEW ? all->K * PANEL * (int64_t)sizeof(bf16) : 0;
}

static void multiply_integers(const product *all, int64_t p, char *scratch) {
    if (all->M <= FEW) {
        times_integers(all, p);
        return;
    }
    widen_panel((const int8_t *)all->panels + p * PANEL * all->K, (bf16 *)scratch, all->K * PANEL);
    times_widened(all, (const bf16 *)scratch, p, scratch + widened_bytes(all));
}

static void multiply_some(void *context, int64_t first_job, int64_t end_job, int seat) {
    const product *all = context;
    int64_t first = first_job * all->together, end = end_job * all->together, num_panels = (all->N + PANEL - 1) / PANEL;
    if (end > num_panels) end = num_panels;
    char *scratch = all->scratch + seat * all->scratch_bytes;
    begin_panels(all->M);
    if (!all->is_int8) times_panels(all, first, end, scratch);
    for (int64_t p = first; all->is_int8 && p < end; p++) multiply_integers(all, p, scratch);
    end_panels();
}

/* Fills in the rest of `all` and runs the product. Returns 0, or 1 if memory runs out. */
static int multiply_all(product all, int num_threads) {
    int has_layout = wants_layout(all.M, all.is_int8);
    int64_t num_panels = (all.N + PANEL - 1) / PANEL, laid_out = has_layout ? laid_out_bytes(all.M, all.K) : 0;
    all.together = has_layout && !all.is_int8 ? panels_together(&all, num_panels, num_threads) : 1;
    int64_t waiting = has_layout ? waiting_bytes(all.K, all.ups ? 2 * all.together : all.together) : 0;
    all.scratch_bytes = widened_bytes(&all) + waiting;
    size_t bytes = (size_t)(laid_out + num_threads * all.scratch_bytes);
    char *scratch = bytes ? aligned_alloc(64, bytes) : 0;
    if (bytes && !scratch) return 1;
    all.scratch = scratch + laid_out;
    if (has_layout) {
        all.laid_out = (bf16 *)scratch;
        lay_out_rows(&all, num_threads);
    }
    team_run(multiply_some, &all, (num_panels + all.together - 1) / all.together, num_threads);
    free(scratch);
    return 0;
}

/* out = x @ w.T * scale + bias. x: [M, K]; out: [M, N] in bf16, or the same values in fp32 if is_wide; panels: bf16, or
 * int8 if is_int8; scale, bias: fp32, padded to whole panels. Returns 0, or 1 if memory runs out. */
int octavo_matmul(const bf16 *x, const void *panels, int is_int8, const float *scale, const float *bias, void *out,
                  int is_wide, int64_t M, int64_t N, int64_t K, int num_threads) {
    product all = {x, panels, is_int8, scale, bias, out, is_wide, M, N, K, 0, 0, 0, 0, 0};
    return multiply_all(all, num_threads);
}

int octavo_can_gate(int64_t M, int64_t I) { return can_gate(M, I); }

/* out = silu(gate) * up, where the first I outputs of the bf16 weights are gates: the same bits as with two kernels,
 * without a pass over memory between them. out: [M, I]. Call it only if `octavo_can_gate`. Returns 0, or 1 if memory
 * runs out. */
int octavo_matmul_gated(const bf16 *x, const void *panels, const float *scale, const float *bias, bf16 *out, int64_t M,
                        int64_t I, int64_t K, int num_threads) {
    product all = {x, panels, 0, scale, bias, out, 0, M, I, K, I / PANEL, 0, 0, 0, 0};
    return multiply_all(all, num_threads);
}

#endif
