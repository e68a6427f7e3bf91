/* The maximum of each row of logits and its first index. The slow reference is torch's max (see ops.py).
 *
 * Legend: S rows · V columns. Must not know: torch, Python, what the columns mean.
 */

#include "team.h"
#include "vectors.h"

#define PART 2048 /* columns in a part; only the part with the maximum is searched again for its index */

typedef struct {
    const float *x;
    int64_t stride, V;
    float *most;
    int64_t *index;
} rows;

/* The maximum of a part; NaN if it has one. */
static float largest_of(const float *x, int64_t count) {
    int64_t even = count / LANES * LANES;
    vec most = splat(-INFINITY);
    ivec has_nan = {0};
    for (int64_t i = 0; i < even; i += LANES) {
        vec here;
        memcpy(&here, x + i, sizeof here); /* a row may be unaligned */
        ivec is_more = here > most;
        has_nan |= here != here;
        most = (vec)(((ivec)here & is_more) | ((ivec)most & ~is_more));
    }
    float largest = -INFINITY;
    for (int i = 0; i < LANES; i++) {
        if (has_nan[i]) return NAN;
        if (most[i] > largest) largest = most[i];
    }
    for (int64_t i = even; i < count; i++) {
        if (x[i] != x[i]) return NAN;
        if (x[i] > largest) largest = x[i];
    }
    return largest;
}

static void search_row(const float *x, int64_t V, float *most, int64_t *index) {
    int64_t part = 0;
    *most = -INFINITY, *index = 0;
    for (int64_t first = 0; first < V; first += PART) {
        float largest = largest_of(x + first, V - first < PART ? V - first : PART);
        if (largest > *most) *most = largest, part = first;
        if (largest != largest) { /* a NaN: the other parts do not matter */
            *most = NAN;
            return;
        }
    }
    if (*most == -INFINITY) return;
    *index = part;
    while (x[*index] != *most) ++*index;
}

static void search_some(void *context, int64_t first, int64_t end, int seat) {
    const rows *all = context;
    (void)seat;
    for (int64_t s = first; s < end; s++)
        search_row(all->x + s * all->stride, all->V, all->most + s, all->index + s);
}

/* x: [S, V], rows stride apart. most: [S]; NaN if a row has one (index is 0 then). */
void octavo_largest(const float *x, int64_t stride, float *most, int64_t *index, int64_t S, int64_t V,
                    int num_threads) {
    rows all = {x, stride, V, most, index};
    team_run(search_some, &all, S, num_threads);
}
