/* y = x W^T + b for few rows and many, with W as float32, as bfloat16 that is widened in registers, or
 * as bfloat16, int8 or integers in groups that the processor multiplies as bfloat16 itself, by rows rounded to that,
 * two inputs at a time.
 *
 * Every output is one chain of fused multiply-adds over the inputs in ascending order, whatever the
 * number of rows and wherever a row stands: a row's result depends on that row alone, to the bit.
 *
 * Few rows take both strips of a block at once, more rows one after the other, so that a strip is read
 * from memory while the former is computed.
 */
#include <type_traits>

#include "group_tiles.h"
#include "grouped.h"
#include "operations.h"
#include "pool.h"
#include "product.h"
#include "tiles.h"
#include "vectors.h"

/* Steps of the weights that are asked for ahead. */
enum { AHEAD = 64 };
/* Rows that share a pass over a block: what the registers hold beside the weights. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { NARROW_ROWS = 6, WIDE_ROWS = 12, WIDE_GROUPED_ROWS = 10 };
#else
enum { NARROW_ROWS = 2, WIDE_ROWS = 5, WIDE_GROUPED_ROWS = 4 };
#endif
template <int format>
constexpr int MOST_ROWS = is_grouped(format) ? WIDE_GROUPED_ROWS : WIDE_ROWS;

extern "C" long linear_block() { return BLOCK; }

/* Whether BF16_PRODUCTS can be asked for. */
extern "C" int multiplies_bf16() { return MULTIPLIES_BF16; }

/* A panel holds the rows of one pass, input by input: [in][rows of the pass]; rounded ones two inputs
 * in 32 bits, [in / 2][rows of the pass].  Rows that lie a power of two apart would fall into the same
 * few lines of the cache. */
template <int format>
static long num_passes(const Product *product) {
    return product->num_rows <= NARROW_ROWS ? 1 : (product->num_rows + MOST_ROWS<format> - 1) / MOST_ROWS<format>;
}

/* Whether each pass takes both strips of a block: where there is one, and where two would otherwise take so few rows of
 * one strip that widening its weights is what takes the time. */
template <int format>
static bool takes_both_strips(long num_rows) {
    return num_rows <= (is_grouped(format) && num_rows > MOST_ROWS<format> ? 2 : 1) * NARROW_ROWS;
}

static long first_row(const Product *product, long pass, long passes) {
    return product->num_rows * pass / passes;
}

/* Where the panel of the pass from `row` on begins. */
template <int format>
static float *panel_of(const Product *product, long row) {
    const long inputs = product->num_inputs;
    return product->panels + row * (rounds_rows(format) ? (inputs + 1) / 2 : inputs);
}

template <int format>
static void fill_panel(void *argument, long pass) {
    const Product *product = static_cast<const Product *>(argument);
    const long passes = num_passes<format>(product), inputs = product->num_inputs;
    const long row = first_row(product, pass, passes), count = first_row(product, pass + 1, passes) - row;
    float *panel = panel_of<format>(product, row);
    for (long r = 0; r < count; r++) {
        const float *x = product->rows + (row + r) * inputs;
        if constexpr (rounds_rows(format)) {
            uint32_t *pairs = (uint32_t *)panel + r, buffer[LANES];
            long k = 0;
            for (; k + 2 * LANES <= inputs; k += 2 * LANES) {
                *(vuint *)buffer = rounded_pairs(x + k);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++, pairs += count) *pairs = buffer[i];
            }
            for (; k < inputs; k += 2, pairs += count)
                *pairs = float_to_bf16(x[k]) | (k + 1 < inputs ? (uint32_t)float_to_bf16(x[k + 1]) << 16 : 0);
            if constexpr (has_minimum(format)) sum_inputs<format>(product, row + r);
        } else {
            for (long k = 0; k < inputs; k++) panel[k * count + r] = x[k];
        }
    }
}

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
 * weights `ahead` (in 32 bits; grouped ones, in bytes) of each are asked for. */
template <int num_rows, int num_vectors, int format>
static __attribute__((noinline)) void tile(const Product *product, long block, long row, int first, long ahead) {
    const long inputs = product->num_inputs;
    const float *x = panel_of<format>(product, row);
    vfloat sums[num_rows][num_vectors];
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) sums[r][v] = vfloat{};
    if constexpr (is_grouped(format)) {
        multiply_groups<num_rows, num_vectors, format>(product, block, (const uint32_t *)x, row, first, ahead, sums);
    } else if constexpr (rounds_rows(format)) {
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

/* Weights from a strip to the next one, or of a block in groups, as `ahead` counts them. */
template <int format>
static long strip_size(const Product *product) {
    if constexpr (is_grouped(format)) {
        const Groups<format> groups(product);
        return groups.count * groups.bytes;
    }
    return (format == FLOAT32 ? product->num_inputs : (product->num_inputs + 1) / 2) * STRIP;
}

/* The weights that a pass which reads them from memory asks for, in the same units. */
template <int format>
static long ahead_of(const Product *product) {
    if constexpr (is_grouped(format)) return Groups<format>(product).ahead();
    return AHEAD * STRIP;
}

template <int format>
static void do_block(void *argument, long block) {
    const Product *product = static_cast<const Product *>(argument);
    const long passes = num_passes<format>(product), strip = strip_size<format>(product), ahead = ahead_of<format>(product);
    if (takes_both_strips<format>(product->num_rows)) {
        for (long pass = 0; pass < passes; pass++) {
            const long row = first_row(product, pass, passes), end = first_row(product, pass + 1, passes);
            tile_of<1, NARROW_ROWS, VECTORS, format>((int)(end - row), product, block, row, 0, pass == 0 ? ahead : strip);
        }
        return;
    }
    for (int first = 0; first < VECTORS; first += 2) {
        /* The first pass reads this strip from memory, the others ask for the thread's next one. */
        const long next = first == 0 || is_grouped(format) ? strip : (2 * product->num_threads - 1) * strip;
        for (long pass = 0; pass < passes; pass++) {
            const bool is_read = pass == 0 && (first == 0 || !is_grouped(format)); /* groups hold both strips */
            const long row = first_row(product, pass, passes), end = first_row(product, pass + 1, passes);
            tile_of<(MOST_ROWS<format> + 1) / 2, MOST_ROWS<format>, 2, format>((int)(end - row), product, block, row, first,
                                                                               is_read ? ahead : next);
        }
    }
}

template <int format>
static void multiply(Product product) {
    if (product.num_rows == 1 && !rounds_rows(format))
        product.panels = (float *)product.rows;
    else
        run_blocks(fill_panel<format>, &product, num_passes<format>(&product), product.num_threads);
    run_blocks(do_block<format>, &product, (product.num_outputs + BLOCK - 1) / BLOCK, product.num_threads);
}

template <int bits, bool has_minimum>
static void multiply_grouped(const Product &product, long group) {
    constexpr int format = grouped_format(bits, has_minimum);
    if (multiplies_groups_in_tiles(group)) return groups_in_tiles<format>(product);
    multiply<format>(product);
}

static void multiply_grouped(const Product &product) {
    const GroupedHeader &header = *static_cast<const GroupedHeader *>(product.weight);
    if (header.bits == 4 && header.has_minimum) return multiply_grouped<4, true>(product, header.group);
    if (header.bits == 4) return multiply_grouped<4, false>(product, header.group);
    if (header.has_minimum) return multiply_grouped<8, true>(product, header.group);
    multiply_grouped<8, false>(product, header.group);
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
    multiply_grouped(product);
}
