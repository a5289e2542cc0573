/* y = x W^T + b for few rows and many, with W as float32, as bfloat16 that is widened in registers, or as bfloat16 that
 * the processor multiplies itself, by rows rounded to that, two inputs at a time.  Those of groups are in groups.h.
 *
 * Every output is one chain of fused multiply-adds over the inputs in ascending order, whatever the
 * number of rows and wherever a row stands: a row's result depends on that row alone, to the bit.
 *
 * Few rows take both strips of a block at once, more rows one after the other, so that a strip is read
 * from memory while the former is computed.
 */
#include "operations.h"
#include "pool.h"
#include "product.h"
#include "tiles.h"
#include "vectors.h"

/* Steps of the weights that are asked for ahead. */
enum { AHEAD = 64 };
/* Rows that share a pass over a block: what the registers hold beside the weights. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { NARROW_ROWS = 6, WIDE_ROWS = 12 };
#else
enum { NARROW_ROWS = 2, WIDE_ROWS = 5 };
#endif

extern "C" long linear_block() { return BLOCK; }

/* Whether BF16_PRODUCTS can be asked for. */
extern "C" int multiplies_bf16() { return MULTIPLIES_BF16; }

/* A panel holds the rows of one pass, input by input: [in][rows of the pass]; rounded ones two inputs
 * in 32 bits, [in / 2][rows of the pass].  Rows that lie a power of two apart would fall into the same
 * few lines of the cache. */
static long num_passes(const Product *product) {
    return product->num_rows <= NARROW_ROWS ? 1 : (product->num_rows + WIDE_ROWS - 1) / WIDE_ROWS;
}

static long first_row(const Product *product, long pass, long passes) {
    return product->num_rows * pass / passes;
}

/* Where the panel of the pass from `row` on begins. */
template <int format>
static float *panel_of(const Product *product, long row) {
    const long inputs = product->num_inputs;
    return product->panels + row * (format == BF16_PRODUCTS ? (inputs + 1) / 2 : inputs);
}

template <int format>
static void fill_panel(void *argument, long pass) {
    const Product *product = static_cast<const Product *>(argument);
    const long passes = num_passes(product), inputs = product->num_inputs;
    const long row = first_row(product, pass, passes), count = first_row(product, pass + 1, passes) - row;
    float *panel = panel_of<format>(product, row);
    for (long r = 0; r < count; r++) {
        const float *x = product->rows + (row + r) * inputs;
        if constexpr (format == BF16_PRODUCTS) {
            uint32_t *pairs = (uint32_t *)panel + r, buffer[LANES];
            long k = 0;
            for (; k + 2 * LANES <= inputs; k += 2 * LANES) {
                round_to_bf16(x + k, (uint16_t *)buffer, 2 * LANES);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++, pairs += count) *pairs = buffer[i];
            }
            for (; k < inputs; k += 2, pairs += count) {
                *pairs = 0;
                round_to_bf16(x + k, (uint16_t *)pairs, k + 1 < inputs ? 2 : 1);
            }
        } else {
            for (long k = 0; k < inputs; k++) panel[k * count + r] = x[k];
        }
    }
}

/* One step of the weights of a block's vectors, which lie two to a strip; those `ahead` are asked for. */
template <typename Item, int num_vectors>
INLINE void load_weights(vuint (&weights)[num_vectors], const Item *w, long strip, long ahead) {
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; v++) {
        const Item *from = w + v / 2 * strip + v % 2 * LANES;
        weights[v] = *(const vuint *)from;
        /* Through the second level: around it (0) an Intel Xeon reads at less than half the speed; 1 to 3 are alike. */
        __builtin_prefetch(from + ahead, 0, 2);
    }
}

/* One pass's `num_rows` rows by `num_vectors` vectors of outputs, the first one `first` of the block; the
 * weights `ahead` of each are asked for. */
template <int num_rows, int num_vectors, int format>
static __attribute__((noinline)) void tile(const Product *product, long block, long row, int first, long ahead) {
    const long inputs = product->num_inputs;
    const float *x = panel_of<format>(product, row);
    vfloat sums[num_rows][num_vectors];
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) sums[r][v] = vfloat{};
    if constexpr (format == BF16_PRODUCTS) {
        const long pairs = (inputs + 1) / 2, strip = pairs * STRIP;
        const uint32_t *w = (const uint32_t *)product->weight + block * 2 * strip + first / 2 * strip;
        const uint32_t *both = (const uint32_t *)x;
        for (long k = 0; k < pairs; k++, w += STRIP, both += num_rows) {
            vuint weights[num_vectors];
            load_weights(weights, w, strip, ahead);
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++) {
                const vuint each = both[r] - vuint{};
#pragma GCC unroll 4
                for (int v = 0; v < num_vectors; v++) sums[r][v] = add_products(sums[r][v], each, weights[v]);
            }
        }
    } else if constexpr (format == BF16) {
        const long pairs = (inputs + 1) / 2;
        const long strip = pairs * STRIP; /* from one strip to the next */
        const uint32_t *w = (const uint32_t *)product->weight + block * 2 * strip + first / 2 * strip;
        for (long k = 0; k + 1 < inputs; k += 2, w += STRIP, x += 2 * num_rows) {
            vuint both[num_vectors];
            load_weights(both, w, strip, ahead);
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++) {
                const vfloat each = splat(x[r]);
#pragma GCC unroll 4
                for (int v = 0; v < num_vectors; v++) sums[r][v] = fma_of(each, lower_half(both[v]), sums[r][v]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++) {
                const vfloat each = splat(x[num_rows + r]);
#pragma GCC unroll 4
                for (int v = 0; v < num_vectors; v++) sums[r][v] = fma_of(each, upper_half(both[v]), sums[r][v]);
            }
        }
        if (inputs % 2)
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
                for (int v = 0; v < num_vectors; v++) {
                    const vuint both = *(const vuint *)(w + v / 2 * strip + v % 2 * LANES);
                    sums[r][v] = fma_of(splat(x[r]), lower_half(both), sums[r][v]);
                }
    } else {
        const long strip = inputs * STRIP;
        const float *w = (const float *)product->weight + block * 2 * strip + first / 2 * strip;
        for (long k = 0; k < inputs; k++, w += STRIP, x += num_rows) {
            vuint weights[num_vectors];
            load_weights(weights, w, strip, ahead);
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++) {
                const vfloat each = splat(x[r]);
#pragma GCC unroll 4
                for (int v = 0; v < num_vectors; v++) sums[r][v] = fma_of(each, (vfloat)weights[v], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) {
            const long output = block * BLOCK + (first + v) * LANES;
            store_outputs(product, row + r, output, sums[r][v]);
        }
}

/* The tile for `count` rows, `least` to `most` of them. */
template <int least, int most, int num_vectors, int format>
void tile_of(int count, const Product *product, long block, long row, int first, long ahead) {
    if constexpr (most > least)
        if (count < most) return tile_of<least, most - 1, num_vectors, format>(count, product, block, row, first, ahead);
    tile<most, num_vectors, format>(product, block, row, first, ahead);
}

template <int format>
static void do_block(void *argument, long block) {
    const Product *product = static_cast<const Product *>(argument);
    const long passes = num_passes(product), ahead = AHEAD * STRIP;
    const long strip = (format == FLOAT32 ? product->num_inputs : (product->num_inputs + 1) / 2) * STRIP;
    if (product->num_rows <= NARROW_ROWS)
        return tile_of<1, NARROW_ROWS, VECTORS, format>((int)product->num_rows, product, block, 0, 0, ahead);
    for (int first = 0; first < VECTORS; first += 2) {
        for (long pass = 0; pass < passes; pass++) {
            const long row = first_row(product, pass, passes), end = first_row(product, pass + 1, passes);
            /* The first pass reads this strip from memory, the others ask for the one behind it. */
            tile_of<(WIDE_ROWS + 1) / 2, WIDE_ROWS, 2, format>((int)(end - row), product, block, row, first,
                                                               pass == 0 ? ahead : strip);
        }
    }
}

template <int format>
static void multiply(Product product) {
    if (product.num_rows == 1 && format != BF16_PRODUCTS)
        product.panels = (float *)product.rows;
    else
        run_blocks(fill_panel<format>, &product, num_passes(&product), product.num_threads);
    run_blocks(do_block<format>, &product, (product.num_outputs + BLOCK - 1) / BLOCK, product.num_threads,
               NEIGHBOURS);
}

extern "C" void linear(const float *rows, float *panels, const void *weight, const float *bias, float *output, long num_rows,
            long num_inputs, long num_outputs, int format, int num_threads) {
    const Product product = {rows, panels, weight, bias, output, num_rows, num_inputs, num_outputs, num_threads};
    if (num_rows == 0) return;
    if (format == GROUPS)
        return multiply_groups(rows, panels, weight, bias, output, num_rows, num_inputs, num_outputs, num_threads);
    if (format == FLOAT32) return multiply<FLOAT32>(product);
    if (multiplies_in_tiles(format, num_inputs)) return linear_in_tiles(product);
    if (format == BF16) return multiply<BF16>(product);
    multiply<BF16_PRODUCTS>(product);
}
