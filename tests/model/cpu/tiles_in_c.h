/* AMX's tiles by plain C, for tiles_amx.h on CPUs without them. What the processor would end the process for ends it here:
 * tiles that are not configured, or whose shapes do not belong together.
 */

#include <stdlib.h>

static _Thread_local struct {
    int is_configured;
    int rows[8], bytes[8];
    unsigned char data[8][16][64];
} tiles;

static inline void tile_must(int holds) {
    if (!holds) abort();
}

static inline void tile_configure(const unsigned char *config) {
    memset(&tiles, 0, sizeof tiles);
    tile_must(config[0] == 1);
    for (int t = 0; t < 8; t++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * t, sizeof bytes);
        tiles.bytes[t] = bytes, tiles.rows[t] = config[48 + t];
        tile_must(bytes <= 64 && tiles.rows[t] <= 16 && !bytes == !tiles.rows[t]);
    }
    tiles.is_configured = 1;
}

static inline void tile_zero(int t) {
    tile_must(tiles.is_configured && tiles.rows[t]);
    memset(tiles.data[t], 0, sizeof tiles.data[t]);
}

static inline void tile_load(int t, const void *from, int64_t step) {
    tile_zero(t);
    for (int r = 0; r < tiles.rows[t]; r++) memcpy(tiles.data[t][r], (const char *)from + r * step, (size_t)tiles.bytes[t]);
}

static inline void tile_store(int t, void *to, int64_t step) {
    tile_must(tiles.is_configured && tiles.rows[t]);
    for (int r = 0; r < tiles.rows[t]; r++) memcpy((char *)to + r * step, tiles.data[t][r], (size_t)tiles.bytes[t]);
}

static inline float tile_widened(const unsigned char *from) {
    uint32_t bits = (uint32_t)from[1] << 24 | (uint32_t)from[0] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline void tile_multiply(int sums, int x, int w) {
    tile_must(tiles.is_configured && tiles.rows[sums] == tiles.rows[x] && tiles.bytes[x] == 4 * tiles.rows[w]);
    tile_must(tiles.bytes[sums] == tiles.bytes[w]);
    for (int r = 0; r < tiles.rows[x]; r++)
        for (int n = 0; n < tiles.bytes[w]; n += 4) {
            float sum;
            memcpy(&sum, tiles.data[sums][r] + n, sizeof sum);
            for (int k = 0; k < tiles.rows[w]; k++)
                for (int half = 0; half < 4; half += 2)
                    sum += tile_widened(tiles.data[x][r] + 4 * k + half) * tile_widened(tiles.data[w][k] + n + half);
            memcpy(tiles.data[sums][r] + n, &sum, sizeof sum);
        }
}

#define TILE_CONFIGURE(config) tile_configure((const unsigned char *)&(config))
#define TILE_RELEASE() ((void)memset(&tiles, 0, sizeof tiles))
#define TILE_ZERO(t) tile_zero(t)
#define TILE_LOAD(t, from, step) tile_load(t, from, step)
#define TILE_PASS(t, from, step) tile_load(t, from, step)
#define TILE_STORE(t, to, step) tile_store(t, to, step)
#define TILE_MULTIPLY(sums, x, w) tile_multiply(sums, x, w)
