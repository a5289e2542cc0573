/* y = x W^T + b for few rows and many, with W as float32, as bfloat16 that is widened in registers, or
 * as bfloat16 or int8 that the processor multiplies as bfloat16 itself, by rows rounded to that, two inputs
 * at a time.
 *
 * Every output is one chain of fused multiply-adds over the inputs in ascending order, whatever the
 * number of rows and wherever a row stands: a row's result depends on that row alone, to the bit.
 *
 * Few rows take both strips of a block at once, more rows one after the other, so that a strip is read
 * from memory while the former is computed.
 */
#include <type_traits>

#include "operations.h"
#include "panels.h"
#include "pool.h"
#include "product.h"
#include "tiles.h"
#include "vectors.h"

/* Steps of the weights that are asked for ahead. */
enum { AHEAD = 64 };
extern "C" long linear_block() { return BLOCK; }

/* Whether BF16_PRODUCTS can be asked for. */
extern "C" int multiplies_bf16() { return MULTIPLIES_BF16; }

/* The scales that int8 weights have; they are as many as the blocks' outputs. */
static const float *scales_of(const Product *product) { return (const float *)product->weight; }

template <int format>
static const void *weights_of(const Product *product) {
    const long padded = (product->num_outputs + BLOCK - 1) / BLOCK * BLOCK;
    return format == INT8_PRODUCTS ? scales_of(product) + padded : product->weight;
}

/* One step of the weights of a block's vectors, which lie two to a strip; those `ahead` are asked for. */
template <typename Item, int num_vectors>
INLINE void load_weights(vuint (&weights)[num_vectors], const Item *w, long strip, long ahead) {
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; v++) {
        const Item *from = w + v / 2 * strip + v % 2 * LANES;
        if constexpr (sizeof(Item) == 2)
            weights[v] = widened_pairs((const int8_t *)from);
        else
            weights[v] = *(const vuint *)from;
        /* Through the second level: around it (0) an Intel Xeon reads at less than half the speed; 1 to 3 are alike. */
        __builtin_prefetch(from + ahead, 0, 2);
    }
}

/* One pass's `num_rows` rows by `num_vectors` vectors of outputs, the first one `first` of the block; the
 * weights `ahead` (in 32 bits) of each are asked for. */
template <int num_rows, int num_vectors, int format>
static __attribute__((noinline)) void tile(const Product *product, long block, long row, int first, long ahead) {
    const long inputs = product->num_inputs;
    const float *x = panel_of<format>(product, row);
    vfloat sums[num_rows][num_vectors];
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) sums[r][v] = vfloat{};
    if constexpr (rounds_rows(format)) {
        /* Of two inputs: 32 bits of bfloat16, or 16 of int8. */
        using Pair = std::conditional_t<format == INT8_PRODUCTS, uint16_t, uint32_t>;
        const long pairs = (inputs + 1) / 2, strip = pairs * STRIP;
        const Pair *w = (const Pair *)weights_of<format>(product) + block * 2 * strip + first / 2 * strip;
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
            vuint weights[num_vectors];
            load_weights(weights, w, strip, ahead);
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++) {
                const vfloat each = splat(x[r]);
#pragma GCC unroll 4
                for (int v = 0; v < num_vectors; v++) sums[r][v] += each * (vfloat)weights[v];
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) {
            const long output = block * BLOCK + (first + v) * LANES;
            if constexpr (format == INT8_PRODUCTS) sums[r][v] *= *(const vfloat *)(scales_of(product) + output);
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
    const long num_rows = product->num_rows;
    if (num_rows <= NARROW_ROWS)
        return tile_of<1, NARROW_ROWS, 4, format>((int)num_rows, product, block, 0, 0, AHEAD * STRIP);
    const long passes = num_passes(product);
    const long strip = (format == FLOAT32 ? product->num_inputs : (product->num_inputs + 1) / 2) * STRIP;
    for (int first = 0; first < VECTORS; first += 2) {
        /* The first pass reads this strip from memory, the others ask for the thread's next one. */
        const long next = first == 0 ? strip : (2 * product->num_threads - 1) * strip;
        for (long pass = 0; pass < passes; pass++) {
            const long row = first_row(product, pass, passes), end = first_row(product, pass + 1, passes);
            tile_of<LEAST_WIDE_ROWS, WIDE_ROWS, 2, format>((int)(end - row), product, block, row, first,
                                                           pass == 0 ? AHEAD * STRIP : next);
        }
    }
}

template <int format>
static void multiply(Product product) {
    if (product.num_rows == 1 && !rounds_rows(format))
        product.panels = (float *)product.rows;
    else
        run_blocks(fill_panel<format>, &product, num_passes(&product), product.num_threads);
    run_blocks(do_block<format>, &product, (product.num_outputs + BLOCK - 1) / BLOCK, product.num_threads);
}

extern "C" void linear(const float *rows, float *panels, const void *weight, const float *bias, float *output, long num_rows,
            long num_inputs, long num_outputs, int format, int num_threads) {
    const Product product = {rows, panels, weight, bias, output, num_rows, num_inputs, num_outputs, num_threads};
    if (num_rows == 0) return;
    if (format == FLOAT32) return multiply<FLOAT32>(product);
    if (multiplies_in_tiles(format, num_inputs)) return linear_in_tiles(product);
    if (format == BF16) return multiply<BF16>(product);
    if (format == BF16_PRODUCTS) return multiply<BF16_PRODUCTS>(product);
    if (format == INT8_PRODUCTS) return multiply<INT8_PRODUCTS>(product);
    linear_in_groups(product);
}
