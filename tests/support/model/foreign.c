/* Runs the kernels of model/cpu for another process: foreign.py starts this program under an emulator. Reads calls from
 * stdin, writes results to stdout.
 *
 * A call: the function's name in 32 bytes; a float; the numbers of arguments, of buffers and of pointers in buffers; the
 * arguments, where -1 - b stands for buffer b; for each buffer its size and its bytes; for each pointer its buffer, its
 * offset there and the buffer that it points to. The answer: the return value, then the bytes of all buffers. Integers
 * have 64 bits.
 *
 * All functions are called alike: AArch64 passes integers in registers and then on the stack, eight bytes each, and
 * floats in registers of their own. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 24

#define FUNCTIONS(X) \
    X(octavo_decode_attention) X(octavo_rms_norm) X(octavo_silu_mul) X(octavo_arithmetic) X(octavo_integer_arithmetic) \
    X(octavo_multiply) X(octavo_largest) X(octavo_chunk_attention) X(octavo_layer_rest) X(octavo_invariant_product) \
    X(octavo_rms_norm_f32) X(octavo_silu_mul_f32) X(octavo_attention_f32) X(octavo_rope_write)

#define DECLARED(name) void name(void);
FUNCTIONS(DECLARED)
#undef DECLARED

typedef int64_t word;
typedef word (*function)(word, word, word, word, word, word, word, word, word, word, word, word, word, word, word, word,
                         word, word, word, word, word, word, word, word, float);

static const struct {
    const char *name;
    void (*function)(void);
} functions[] = {
#define NAMED(name) {#name, name},
    FUNCTIONS(NAMED)
#undef NAMED
};

static void get(void *to, size_t size) {
    if (size && fread(to, size, 1, stdin) != 1) exit(0);
}

static word get_word(void) {
    word value;
    get(&value, sizeof value);
    return value;
}

static function named(const char *name) {
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].name, name)) return (function)functions[i].function;
    exit(2);
}

int main(void) {
    for (;;) {
        char name[32], *buffers[MOST];
        word a[MOST] = {0}, sizes[MOST];
        float scale;
        get(name, sizeof name);
        get(&scale, sizeof scale);
        word num_arguments = get_word(), num_buffers = get_word(), num_pointers = get_word();
        if (num_arguments > MOST || num_buffers > MOST) return 3;
        for (word i = 0; i < num_arguments; i++) a[i] = get_word();
        for (word b = 0; b < num_buffers; b++) {
            sizes[b] = get_word();
            buffers[b] = aligned_alloc(64, (size_t)(sizes[b] + 64) / 64 * 64);
            get(buffers[b], (size_t)sizes[b]);
        }
        for (word p = 0; p < num_pointers; p++) {
            word in = get_word(), place = get_word(), to = get_word();
            memcpy(buffers[in] + place, &buffers[to], sizeof(char *));
        }
        for (word i = 0; i < num_arguments; i++)
            if (a[i] < 0) a[i] = (word)buffers[-1 - a[i]];
        word found = named(name)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13],
                                 a[14], a[15], a[16], a[17], a[18], a[19], a[20], a[21], a[22], a[23], scale);
        if (strstr(name, "arithmetic")) { /* returns a text: answered by its length, then its bytes as the only buffer */
            const char *text = (const char *)found;
            word length = (word)strlen(text);
            fwrite(&length, sizeof length, 1, stdout);
            fwrite(text, (size_t)length, 1, stdout);
        } else {
            fwrite(&found, sizeof found, 1, stdout);
        }
        for (word b = 0; b < num_buffers; b++) {
            fwrite(buffers[b], (size_t)sizes[b], 1, stdout);
            free(buffers[b]);
        }
        fflush(stdout);
    }
}
