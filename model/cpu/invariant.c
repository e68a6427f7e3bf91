/* What deterministic mode needs for fp32 models, besides kernels.c and matmul.c: products, norm, SiLU and attention.
 * Each result depends only on its own row (and context): every sum is in one fixed order, whatever the number of rows
 * and threads.
 *
 * Weights of a product are stored in panels of PANEL outputs: [N / PANEL, K, PANEL], fp32. model/cpu/invariant.py
 * checks the arguments.
 *
 * Legend: M rows · N outputs, or query heads · K inputs, or kv heads · T tokens · D model dim · I intermediate ·
 * S sequences · H head dim · P blocks · B block size. Must not know: torch, Python, who owns a block.
 */

#include "team.h"
#include "vectors.h"

#define PANEL 32
#define TILE (LANES == 16 ? 8 : 6)

/* rows: a compile-time constant in each call, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const float *x, int64_t K, const float *panel,
                                                       const float *bias, float *out, int64_t N, int64_t width) {
    for (int64_t first = 0; first < width; first += 2 * LANES) {
        vec low[8], high[8];
        for (int m = 0; m < rows; m++) low[m] = high[m] = (vec){0};
        for (int64_t k = 0; k < K; k++) {
            vec w[2];
            memcpy(w, panel + k * PANEL + first, sizeof w);
            for (int m = 0; m < rows; m++) {
                low[m] += w[0] * x[m * K + k];
                high[m] += w[1] * x[m * K + k];
            }
        }
        for (int m = 0; m < rows; m++) {
            float sums[2 * LANES];
            memcpy(sums, &low[m], sizeof(vec));
            memcpy(sums + LANES, &high[m], sizeof(vec));
            for (int64_t n = first; n < width && n < first + 2 * LANES; n++) out[m * N + n] = sums[n - first] + bias[n];
        }
    }
}

static void rows_times_panel(int64_t rows, const float *x, int64_t K, const float *panel, const float *bias, float *out,
                             int64_t N, int64_t width) {
    switch (rows) {
#define CASE(n) case n: tile(n, x, K, panel, bias, out, N, width); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    }
}

typedef struct {
    const float *x, *panels, *bias;
    float *out;
    int64_t M, N, K;
} product;

static void multiply_some(void *context, int64_t first, int64_t end, int seat) {
    const product *all = context;
    int64_t M = all->M, N = all->N, K = all->K;
    (void)seat;
    for (int64_t p = first; p < end; p++) {
        int64_t width = N - p * PANEL < PANEL ? N - p * PANEL : PANEL;
        for (int64_t m = 0; m < M; m += TILE)
            rows_times_panel(M - m < TILE ? M - m : TILE, all->x + m * K, K, all->panels + p * K * PANEL,
                             all->bias + p * PANEL, all->out + m * N + p * PANEL, N, width);
    }
}

/* out = x @ w.T + bias, all fp32. x: [M, K], out: [M, N]; bias: padded to whole panels. */
void octavo_invariant_product(const float *x, const float *panels, const float *bias, float *out, int64_t M, int64_t N,
                              int64_t K, int num_threads) {
    product all = {x, panels, bias, out, M, N, K};
    team_run(multiply_some, &all, (N + PANEL - 1) / PANEL, num_threads);
}

static inline vec at(const float *from) {
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void put(float *to, vec x) { memcpy(to, &x, sizeof x); }

typedef struct {
    const float *x, *weight;
    float *out;
    int64_t D;
    float epsilon;
} norms;

static void norm_some(void *context, int64_t first, int64_t end, int seat) {
    const norms *all = context;
    int64_t D = all->D;
    (void)seat;
    for (int64_t t = first; t < end; t++) {
        const float *row = all->x + t * D;
        vec squares = {0};
        for (int64_t d = 0; d < D; d += LANES) squares += at(row + d) * at(row + d);
        float factor = 1.0f / sqrtf(sum(squares) / (float)D + all->epsilon);
        for (int64_t d = 0; d < D; d += LANES) put(all->out + t * D + d, at(row + d) * factor * at(all->weight + d));
    }
}

/* out = weight * (x / rms(x)), fp32. x, out: [T, D]. */
void octavo_rms_norm_f32(const float *x, const float *weight, float *out, int64_t T, int64_t D, float epsilon,
                         int num_threads) {
    norms all = {x, weight, out, D, epsilon};
    team_run(norm_some, &all, T, num_threads);
}

typedef struct {
    const float *gate_up;
    float *out;
    int64_t I;
} silus;

static void silu_some(void *context, int64_t first, int64_t end, int seat) {
    const silus *all = context;
    int64_t I = all->I;
    (void)seat;
    for (int64_t t = first; t < end; t++) {
        const float *gate = all->gate_up + t * 2 * I, *up = gate + I;
        for (int64_t i = 0; i < I; i += LANES) put(all->out + t * I + i, silu(at(gate + i)) * at(up + i));
    }
}

/* out = silu(gate) * up, fp32. gate_up: [T, 2 I], out: [T, I]. */
void octavo_silu_mul_f32(const float *gate_up, float *out, int64_t T, int64_t I, int num_threads) {
    silus all = {gate_up, out, I};
    team_run(silu_some, &all, T, num_threads);
}

static float dot(const float *a, const float *b, int64_t H) {
    vec acc = {0};
    for (int64_t h = 0; h < H; h += LANES) acc += at(a + h) * at(b + h);
    return sum(acc);
}

/* Attention of one query head over its context. weight: scratch of context + LANES floats. */
static void attend(const float *q, const float *k_pool, const float *v_pool, const int32_t *table, int64_t context,
                   int64_t stride_P, int64_t B, int64_t H, float scale, float *weight, float *out) {
    float most = -INFINITY, total = 0;
    for (int64_t c = 0; c < context; c++) {
        weight[c] = scale * dot(q, k_pool + table[c / B] * stride_P + c % B * H, H);
        if (weight[c] > most) most = weight[c];
    }
    for (int64_t c = 0; c < LANES; c++) weight[context + c] = -INFINITY;
    for (int64_t c = 0; c < context; c += LANES) {
        vec x = at(weight + c) - most;
        ivec is_nan = x != x;
        put(weight + c, (vec)(((ivec)exp_of(x) & ~is_nan) | ((ivec)x & is_nan)));
    }
    for (int64_t c = 0; c < context; c++) total += weight[c];
    for (int64_t h = 0; h < H; h += LANES) {
        vec acc = {0};
        for (int64_t c = 0; c < context; c++) acc += at(v_pool + table[c / B] * stride_P + c % B * H + h) * weight[c];
        put(out + h, acc / total);
    }
}

typedef struct {
    const float *q, *k_pool, *v_pool;
    const int32_t *table, *context;
    int64_t stride_table, N, K, H, B;
    float scale, *out, *weights;
    int64_t num_weights; /* per thread */
} attentions;

static void attend_some(void *context, int64_t first, int64_t end, int seat) {
    const attentions *all = context;
    int64_t N = all->N, K = all->K, H = all->H, B = all->B;
    float *weight = all->weights + seat * all->num_weights;
    for (int64_t job = first; job < end; job++) {
        int64_t s = job / N, k = job % N / (N / K);
        attend(all->q + job * H, all->k_pool + k * B * H, all->v_pool + k * B * H, all->table + s * all->stride_table,
               all->context[s], K * B * H, B, H, all->scale, weight, all->out + job * H);
    }
}

/* One token per sequence, fp32. q, out: [S, N, H]. Returns 0, or 1 if memory runs out. */
int octavo_attention_f32(const float *q, const float *k_pool, const float *v_pool, const int32_t *table,
                         int64_t stride_table, const int32_t *context, float *out, int64_t S, int64_t N, int64_t K,
                         int64_t H, int64_t B, float scale, int num_threads) {
    int64_t longest = 0;
    for (int64_t s = 0; s < S; s++) longest = context[s] > longest ? context[s] : longest;
    int64_t size = (longest + 2 * LANES - 1) / LANES * LANES;
    float *weights = malloc((size_t)(num_threads * size) * sizeof(float));
    if (!weights) return 1;
    attentions all = {q, k_pool, v_pool, table, context, stride_table, N, K, H, B, scale, out, weights, size};
    team_run(attend_some, &all, S * N, num_threads);
    free(weights);
    return 0;
}
