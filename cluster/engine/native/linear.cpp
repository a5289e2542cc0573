/* y = x W^T + b for few rows and many, with W as float32 or as bfloat16 that is widened in registers.
 *
 * Every output is one chain of fused multiply-adds over the inputs in ascending order, whatever the
 * number of rows and wherever a row stands: a row's result depends on that row alone, to the bit.
 *
 * Layout of W: blocks of BLOCK = 4 * LANES outputs, the last one padded with zeros; a block is two
 * strips, each for float32 [in][2][LANES], for bfloat16 [in / 2][2][LANES][2], an odd number of inputs
 * padded.  Few rows take both strips at once, more rows one after the other, so that a strip is read
 * from memory while the former is computed.
 */
#include "operations.h"
#include "pool.h"
#include "vectors.h"

enum { VECTORS = 4, BLOCK = VECTORS * LANES, STRIP = 2 * LANES };
/* Steps of the weights that are asked for ahead. */
enum { AHEAD = 32 };
/* Rows that share a pass over a block: what the registers hold beside the weights. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { NARROW_ROWS = 6, LEAST_WIDE_ROWS = 6, WIDE_ROWS = 12 };
#else
enum { NARROW_ROWS = 2, LEAST_WIDE_ROWS = 2, WIDE_ROWS = 5 };
#endif

typedef struct {
    const float *rows;
    float *panels;
    const void *weight;
    const float *bias;
    float *output;
    long num_rows, num_inputs, num_outputs;
    int is_bf16;
} Product;

extern "C" long linear_block() { return BLOCK; }

/* A panel holds the rows of one pass, input by input: [in][rows of the pass].  Rows that lie a power
 * of two apart would fall into the same few lines of the cache. */
static long num_passes(const Product *product) {
    return product->num_rows <= NARROW_ROWS ? 1 : (product->num_rows + WIDE_ROWS - 1) / WIDE_ROWS;
}

static long first_row(const Product *product, long pass, long passes) {
    return product->num_rows * pass / passes;
}

static void fill_panel(void *argument, long pass) {
    const Product *product = static_cast<const Product *>(argument);
    const long passes = num_passes(product), inputs = product->num_inputs;
    const long row = first_row(product, pass, passes), count = first_row(product, pass + 1, passes) - row;
    float *panel = product->panels + row * inputs;
    for (long r = 0; r < count; r++) {
        const float *x = product->rows + (row + r) * inputs;
        for (long k = 0; k < inputs; k++) panel[k * count + r] = x[k];
    }
}

/* One pass's `num_rows` rows by `num_vectors` vectors of outputs, the first one `first` of the block. */
template <int num_rows, int num_vectors, bool is_bf16>
static __attribute__((noinline)) void tile(const Product *product, long block, long row, int first) {
    const long inputs = product->num_inputs;
    const float *x = product->panels + row * inputs;
    vfloat sums[num_rows][num_vectors];
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) sums[r][v] = vfloat{};
    if constexpr (is_bf16) {
        const long pairs = (inputs + 1) / 2;
        const long strip = pairs * STRIP; /* from one strip to the next */
        const uint32_t *w = (const uint32_t *)product->weight + block * 2 * strip + first / 2 * strip;
        for (long k = 0; k + 1 < inputs; k += 2, w += STRIP, x += 2 * num_rows) {
            vuint both[num_vectors];
#pragma GCC unroll 4
            for (int v = 0; v < num_vectors; v++) {
                const uint32_t *from = w + v / 2 * strip + v % 2 * LANES;
                both[v] = *(const vuint *)from;
                __builtin_prefetch(from + AHEAD * STRIP);
            }
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++) {
                const vfloat each = splat(x[r]);
#pragma GCC unroll 4
                for (int v = 0; v < num_vectors; v++) sums[r][v] += each * lower_half(both[v]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++) {
                const vfloat each = splat(x[num_rows + r]);
#pragma GCC unroll 4
                for (int v = 0; v < num_vectors; v++) sums[r][v] += each * upper_half(both[v]);
            }
        }
        if (inputs % 2)
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
                for (int v = 0; v < num_vectors; v++)
                    sums[r][v] += splat(x[r]) * lower_half(*(const vuint *)(w + v / 2 * strip + v % 2 * LANES));
    } else {
        const long strip = inputs * STRIP;
        const float *w = (const float *)product->weight + block * 2 * strip + first / 2 * strip;
        for (long k = 0; k < inputs; k++, w += STRIP, x += num_rows) {
            vfloat weights[num_vectors];
#pragma GCC unroll 4
            for (int v = 0; v < num_vectors; v++) {
                const float *from = w + v / 2 * strip + v % 2 * LANES;
                weights[v] = *(const vfloat *)from;
                __builtin_prefetch(from + AHEAD * STRIP);
            }
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++) {
                const vfloat each = splat(x[r]);
#pragma GCC unroll 4
                for (int v = 0; v < num_vectors; v++) sums[r][v] += each * weights[v];
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) {
            const long output = block * BLOCK + (first + v) * LANES;
            float *y = product->output + (row + r) * product->num_outputs + output;
            const float *b = product->bias ? product->bias + output : 0;
            if (output + LANES <= product->num_outputs) {
                vfloat sum = sums[r][v];
                if (b) sum += *(const vfloat *)b;
                *(vfloat *)y = sum;
            } else {
                float lanes[LANES];
                memcpy(lanes, &sums[r][v], sizeof lanes);
                for (long i = 0; output + i < product->num_outputs; i++) y[i] = lanes[i] + (b ? b[i] : 0.0f);
            }
        }
}

/* The tile for `count` rows, `least` to `most` of them. */
template <int least, int most, int num_vectors, bool is_bf16>
void tile_of(int count, const Product *product, long block, long row, int first) {
    if constexpr (most > least)
        if (count < most) return tile_of<least, most - 1, num_vectors, is_bf16>(count, product, block, row, first);
    tile<most, num_vectors, is_bf16>(product, block, row, first);
}

template <bool is_bf16>
static void do_block(void *argument, long block) {
    const Product *product = static_cast<const Product *>(argument);
    const long num_rows = product->num_rows;
    if (num_rows <= NARROW_ROWS) return tile_of<1, NARROW_ROWS, 4, is_bf16>((int)num_rows, product, block, 0, 0);
    const long passes = num_passes(product);
    for (int first = 0; first < VECTORS; first += 2)
        for (long pass = 0; pass < passes; pass++) {
            const long row = first_row(product, pass, passes), end = first_row(product, pass + 1, passes);
            tile_of<LEAST_WIDE_ROWS, WIDE_ROWS, 2, is_bf16>((int)(end - row), product, block, row, first);
    }
}

extern "C" void linear(const float *rows, float *panels, const void *weight, const float *bias, float *output, long num_rows,
            long num_inputs, long num_outputs, int is_bf16, int num_threads) {
    Product product = {rows, panels, weight, bias, output, num_rows, num_inputs, num_outputs, is_bf16};
    if (num_rows == 0) return;
    if (num_rows == 1)
        product.panels = (float *)rows;
    else
        run_blocks(fill_panel, &product, num_passes(&product), num_threads);
    run_blocks(is_bf16 ? do_block<true> : do_block<false>, &product, (num_outputs + BLOCK - 1) / BLOCK, num_threads);
}
