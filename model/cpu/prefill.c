/* Attention of one sequence's new tokens over its cached prefix and themselves.
 *
 * Keys and values are read from their blocks once and stored in the layout of weights for products, since every head of
 * a group and every tile of rows reads them again: in bf16 if the CPU multiplies it, else widened to fp32. The softmax
 * is computed online, SPAN positions at a time (Milakov and Gimelshein 2018). Spans begin at multiples of SPAN,
 * whatever the chunk, so that a token has the same bits however its prompt was divided. Nothing beyond the context is
 * read.
 *
 * Legend: Q new tokens · C context (cached and new) · N query heads · K kv heads · H head dim (a multiple of PANEL) ·
 * P blocks · B block size. Must not know: torch, Python, who owns a block.
 */

#include "team.h"
#include "vectors.h"

#define PANEL 32
#define SPAN 256      /* positions per update of the maximum score; the scores of a tile stay in the L1 cache */
#define MOST_DIM 256

#ifdef __AVX512BF16__
#include "spans_bf16.h"
#else
#include "spans_fp32.h"
#endif

/* Attention of up to TILE tokens of one head, the first at position `first`. stride: from one token to the next in q
 * and out. */
static void attend_tile(const bf16 *q, int64_t rows, int64_t stride, int64_t first, const operand *keys,
                        const operand *values, int64_t H, float factor, bf16 *out) {
    operand q_MH[TILE * MOST_DIM], weight[TILE * SPAN];
    float score[TILE * SPAN], sum[TILE * MOST_DIM], top[TILE], total[TILE] = {0}, shrink[TILE];
    memset(q_MH, 0, sizeof q_MH);
    if (rows < TILE) memset(weight, 0, sizeof weight), memset(shrink, 0, sizeof shrink);
    memset(sum, 0, sizeof sum);
    for (int64_t m = 0; m < rows; m++) take_row(q + m * stride, H, q_MH + m * H);
    for (int m = 0; m < TILE; m++) top[m] = -INFINITY;
    for (int64_t start = 0; start < first + rows; start += SPAN) {
        int64_t left = first + rows - start, num_panels = ((left < SPAN ? left : SPAN) + PANEL - 1) / PANEL;
        int64_t width = num_panels * PANEL;
        score_span(q_MH, keys + start * H, H, num_panels, factor, score);
        for (int64_t m = 0; m < rows; m++) {
            int64_t seen = first + m + 1 - start;
            shrink[m] = soften_span(score + m * SPAN, seen < width ? seen : width, width, top + m, total + m,
                                    weight + m * SPAN);
        }
        mix_span(weight, values + start * H, H, width, shrink, sum);
    }
    for (int64_t m = 0; m < rows; m++) put_mean(sum + m * H, total[m], H, out + m * stride);
}

typedef struct {
    const bf16 *q, *k_pool, *v_pool;
    const int32_t *table;
    bf16 *out;
    operand *keys, *values;
    int64_t Q, C, N, K, H, B, num_panels, tiles;
    float factor;
} chunk;

static void lay_out_some(void *context, int64_t first, int64_t end, int seat) {
    const chunk *all = context;
    int64_t H = all->H, B = all->B, num_panels = all->num_panels, each = num_panels * PANEL * H;
    (void)seat;
    for (int64_t job = first; job < end; job++) {
        int64_t k = job / num_panels, position = job % num_panels * PANEL, to = k * each + position * H;
        for (int64_t j = 0; j < PANEL; j++) {
            int64_t c = position + j, is_there = c < all->C;
            int64_t from = is_there ? ((all->table[c / B] * all->K + k) * B + c % B) * H : 0;
            lay_out_key(is_there ? all->k_pool + from : 0, H, j, all->keys + to);
            lay_out_value(is_there ? all->v_pool + from : 0, H, j, all->values + to);
        }
    }
}

static void attend_some(void *context, int64_t first, int64_t end, int seat) {
    const chunk *all = context;
    int64_t N = all->N, H = all->H, each = all->num_panels * PANEL * H;
    (void)seat;
    begin_spans();
    for (int64_t job = first; job < end; job++) {
        int64_t n = job % N, k = n / (N / all->K), row = (all->tiles - 1 - job / N) * TILE; /* the longest first */
        attend_tile(all->q + (row * N + n) * H, all->Q - row < TILE ? all->Q - row : TILE, N * H, all->C - all->Q + row,
                    all->keys + k * each, all->values + k * each, H, all->factor, all->out + (row * N + n) * H);
    }
    end_spans();
}

/* q, out: [Q, N, H]; the new tokens are the last Q of the context. Returns 0, or 1 if memory runs out. */
int octavo_chunk_attention(const bf16 *q, const bf16 *k_pool, const bf16 *v_pool, const int32_t *table, bf16 *out,
                           int64_t Q, int64_t C, int64_t N, int64_t K, int64_t H, int64_t B, float scale,
                           int num_threads) {
    int64_t num_panels = (C + PANEL - 1) / PANEL, size = K * num_panels * PANEL * H, tiles = (Q + TILE - 1) / TILE;
    operand *keys = aligned_alloc(64, 2 * (size_t)size * sizeof(operand));
    if (!keys) return 1;
    float factor = scale * PER_SCALE;
    chunk all = {q, k_pool, v_pool, table, out, keys, keys + size, Q, C, N, K, H, B, num_panels, tiles, factor};
    team_run(lay_out_some, &all, K * num_panels, num_threads);
    team_run(attend_some, &all, N * tiles, num_threads);
    free(keys);
    return 0;
}
