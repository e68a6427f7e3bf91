/* What follows attention in a decoder layer, in one call: kernels take some ten microseconds, and returning to Python
 * between them would take as long again.
 *
 * Each stage is the same kernel that would be called alone, with the same number of threads, so the bits are the same
 * (the reference of LayerRest is model.layers.decoder.DecoderLayer).
 * Legend: T tokens · D model dim · I intermediate. Must not know: torch, Python.
 */

#include "team.h"
#include "vectors.h"

/* A packed weight for the products: N outputs, K inputs. Must match products.py. */
typedef struct {
    const void *panels;
    const float *scale, *bias;
    int64_t N, K;
    int layout; /* of panels */
} weight;

/* Must match products.py. */
enum layout { PAIRS, INTEGER_PAIRS, INTEGER_FOURS };

/* Must match products.py. */
typedef struct {
    weight o, gate_up, down;
    const bf16 *norm;
    float epsilon;
} layer_rest;

/* Number of threads of each stage. stream: additions and norm. Must match products.py. */
typedef struct {
    int o, gate_up, down, stream, silu;
} stage_threads;

int octavo_matmul(const bf16 *x, const void *panels, int is_int8, const float *scale, const float *bias, void *out,
                  int is_wide, int64_t M, int64_t N, int64_t K, int num_threads);
int octavo_matmul_int8(const bf16 *x, const int8_t *panels, const float *scale, const float *bias, void *out,
                       int is_wide, int64_t M, int64_t N, int64_t K, int num_threads);
int octavo_can_gate(int64_t M, int64_t I);
int octavo_matmul_gated(const bf16 *x, const void *panels, const float *scale, const float *bias, bf16 *out, int64_t M,
                        int64_t I, int64_t K, int num_threads);
void octavo_rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t T, int64_t D, float epsilon,
                     int num_threads);
void octavo_silu_mul(const bf16 *gate_up, bf16 *out, int64_t T, int64_t I, int num_threads);

typedef struct {
    const bf16 *x, *y;
    bf16 *out;
    int64_t D;
} sums;

static void add_some(void *context, int64_t first, int64_t end, int seat) {
    const sums *all = context;
    (void)seat;
    for (int64_t i = first * all->D; i < end * all->D; i += LANES)
        narrow(all->out + i, widen(all->x + i) + widen(all->y + i));
}

/* out = x @ w.T * scale + bias, in bf16, or the same values in fp32 if is_wide. Returns 0, or 1 if memory runs out. */
int octavo_multiply(const weight *by, const bf16 *x, void *out, int is_wide, int64_t T, int num_threads) {
    if (by->layout == INTEGER_FOURS)
        return octavo_matmul_int8(x, by->panels, by->scale, by->bias, out, is_wide, T, by->N, by->K, num_threads);
    return octavo_matmul(x, by->panels, by->layout == INTEGER_PAIRS, by->scale, by->bias, out, is_wide, T, by->N, by->K,
                         num_threads);
}

static int multiply(const weight *by, const bf16 *x, bf16 *out, int64_t T, int num_threads) {
    return octavo_multiply(by, x, out, 0, T, num_threads);
}

/* out = silu(gate) * up, where x @ w.T is gate and up. scratch: T * by->N numbers. */
static int multiply_gated(const weight *by, const bf16 *x, bf16 *out, bf16 *scratch, int64_t T,
                          const stage_threads *threads) {
    int64_t I = by->N / 2;
    if (by->layout == PAIRS && octavo_can_gate(T, I))
        return octavo_matmul_gated(x, by->panels, by->scale, by->bias, out, T, I, by->K, threads->gate_up);
    if (multiply(by, x, scratch, T, threads->gate_up)) return 1;
    octavo_silu_mul(scratch, out, T, I, threads->silu);
    return 0;
}

static void add(const bf16 *x, const bf16 *y, bf16 *out, int64_t T, int64_t D, int num_threads) {
    sums all = {x, y, out, D};
    team_run(add_some, &all, T, num_threads);
}

/* out = h + down(silu(gate) * up), where h = hidden + o(attended), and gate and up are of the normed h. hidden, out:
 * [T, D], different memory. scratch: T * (D + 3 I) numbers. Returns 0, or 1 if memory runs out. */
int octavo_layer_rest(const layer_rest *rest, const bf16 *attended, const bf16 *hidden, bf16 *out, bf16 *scratch,
                      int64_t T, const stage_threads *threads) {
    int64_t D = rest->o.N, I = rest->down.K;
    bf16 *x = scratch, *gate_up = x + T * D, *act = gate_up + T * 2 * I;
    if (multiply(&rest->o, attended, x, T, threads->o)) return 1;
    add(hidden, x, out, T, D, threads->stream);
    octavo_rms_norm(out, rest->norm, x, T, D, rest->epsilon, threads->stream);
    if (multiply_gated(&rest->gate_up, x, act, gate_up, T, threads)) return 1;
    if (multiply(&rest->down, act, x, T, threads->down)) return 1;
    add(out, x, out, T, D, threads->stream);
    return 0;
}
