/* y = x W^T + b with weights in groups of few bits, by rows rounded to bfloat16.
 *
 * The integers become bfloat16, which holds them exactly, and are multiplied with a row's inputs into a sum for the
 * group; an output is the chain of
 *
 *     sum += scale * group's sum;  sum += minimum * sum of the row's inputs in the group
 *
 * over the groups in ascending order, whatever the number of rows and wherever a row stands: a row's result
 * depends on that row alone, to the bit.
 *
 * For few rows the integers are widened in registers.  For more, a group is widened once into memory that stays in
 * the first level of the cache, and all rows take it from there. */
#include "grouped.h"
#include "operations.h"
#include "panels.h"
#include "pool.h"

namespace {

/* Bytes of the weights that are asked for ahead; rows that share what a thread has widened. */
enum { AHEAD_BYTES = 4096, SHARING_ROWS = 8 * WIDE_ROWS };

template <int num_rows, int num_vectors>
using Sums = vfloat[num_rows][num_vectors];

/* sums += scales * partial + minimums * the rows' inputs, of which the first row's stand at `inputs`. */
template <int num_rows, int num_vectors>
INLINE void add_group(const Grouped &weights, const vfloat *scales, const vfloat *minimums, const float *inputs,
                      const Sums<num_rows, num_vectors> &partial, vfloat *sums, int stride) {
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) sums[r * stride + v] += scales[v] * partial[r][v];
    if (!weights.has_minimum) return;
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++) {
        const vfloat input = splat(inputs[r * weights.num_groups]);
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) sums[r * stride + v] += minimums[v] * input;
    }
}

template <int num_rows, int num_vectors>
INLINE void clear(Sums<num_rows, num_vectors> &sums) {
#pragma GCC unroll 16
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) sums[r][v] = vfloat{};
}

/* All rows by a block, widened in registers. */
template <int bits, int num_rows>
__attribute__((noinline)) void narrow_block(const Grouped &weights, long block) {
    const uint8_t *of_group = weights.block(block), *end = of_group + weights.block_bytes;
    const uint32_t *pairs = reinterpret_cast<const uint32_t *>(weights.panels);
    const float *inputs = weights.input_sums;
    Sums<num_rows, VECTORS> sums;
    clear<num_rows, VECTORS>(sums);
    for (; of_group < end; of_group += weights.group_bytes, pairs += weights.group / 2 * num_rows, inputs++) {
        weights.ask_ahead(of_group, end, AHEAD_BYTES);
        Sums<num_rows, VECTORS> partial;
        clear<num_rows, VECTORS>(partial);
        for_pairs<bits>(weights.integers(of_group), weights.group, [&](int k, int v, vuint widened) {
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++)
                partial[r][v] = add_products(partial[r][v], pairs[k * num_rows + r] - vuint{}, widened);
        });
        const Scales by(weights, of_group);
        add_group<num_rows, VECTORS>(weights, by.scales, by.minimums, inputs, partial, sums[0], VECTORS);
    }
    for (int r = 0; r < num_rows; r++)
        for (int v = 0; v < VECTORS; v++) store_outputs(&weights, r, block * BLOCK + v * LANES, sums[r][v]);
}

template <int bits, int most>
void narrow_block_of(const Grouped &weights, long block) {
    if constexpr (most > 1)
        if (weights.num_rows < most) return narrow_block_of<bits, most - 1>(weights, block);
    narrow_block<bits, most>(weights, block);
}

/* A group's share of a pass's rows, by two vectors of outputs.  widened: [group / 2][VECTORS]. */
template <int num_rows>
__attribute__((noinline)) void wide_group(const Grouped &weights, const vuint *widened, const uint32_t *pairs,
                                          const vfloat *scales, const vfloat *minimums, const float *inputs, vfloat *sums) {
    Sums<num_rows, 2> partial;
    clear<num_rows, 2>(partial);
    for (int k = 0; k < weights.group / 2; k++, widened += VECTORS, pairs += num_rows)
#pragma GCC unroll 16
        for (int r = 0; r < num_rows; r++) {
            const vuint each = pairs[r] - vuint{};
            partial[r][0] = add_products(partial[r][0], each, widened[0]);
            partial[r][1] = add_products(partial[r][1], each, widened[1]);
        }
    add_group<num_rows, 2>(weights, scales, minimums, inputs, partial, sums, VECTORS);
}

template <int most, typename... Arguments>
void wide_group_of(int count, const Arguments &...arguments) {
    if constexpr (most > LEAST_WIDE_ROWS)
        if (count < most) return wide_group_of<most - 1>(count, arguments...);
    wide_group<most>(arguments...);
}

/* The rows of the passes from `pass` to `stop`, by a block. */
template <int bits>
void wide_block(const Grouped &weights, long block, long pass, long stop) {
    const long passes = num_passes(&weights), row = first_row(&weights, pass, passes);
    const long num_rows = first_row(&weights, stop, passes) - row, size = weights.group / 2;
    const uint8_t *of_group = weights.block(block), *end = of_group + weights.block_bytes;
    alignas(64) vuint widened[MAX_GROUP / 2 * VECTORS];
    alignas(64) vfloat sums[SHARING_ROWS * VECTORS];
    for (long i = 0; i < num_rows * VECTORS; i++) sums[i] = vfloat{};
    for (long g = 0; of_group < end; g++, of_group += weights.group_bytes) {
        weights.ask_ahead(of_group, end, AHEAD_BYTES);
        for_pairs<bits>(weights.integers(of_group), weights.group,
                        [&](int k, int v, vuint pairs) { widened[k * VECTORS + v] = pairs; });
        const Scales by(weights, of_group);
        for (int first = 0; first < VECTORS; first += 2)
            for (long each = pass; each < stop; each++) {
                const long from = first_row(&weights, each, passes);
                const int count = (int)(first_row(&weights, each + 1, passes) - from);
                const uint32_t *pairs = reinterpret_cast<const uint32_t *>(panel_of<GROUPED>(&weights, from));
                wide_group_of<WIDE_ROWS>(count, weights, widened + first, pairs + g * size * count, by.scales + first,
                                         by.minimums + first, weights.input_sums + from * weights.num_groups + g,
                                         sums + (from - row) * VECTORS + first);
            }
    }
    for (long r = 0; r < num_rows; r++)
        for (int v = 0; v < VECTORS; v++)
            store_outputs(&weights, row + r, block * BLOCK + v * LANES, sums[r * VECTORS + v]);
}

template <int bits>
void do_block(void *argument, long block) {
    const Grouped &weights = *static_cast<const Grouped *>(argument);
    if (weights.num_rows <= NARROW_ROWS) return narrow_block_of<bits, NARROW_ROWS>(weights, block);
    const long passes = num_passes(&weights), sharing = SHARING_ROWS / WIDE_ROWS;
    for (long pass = 0; pass < passes; pass += sharing)
        wide_block<bits>(weights, block, pass, pass + sharing < passes ? pass + sharing : passes);
}

/* Sums of a row's inputs, rounded, over each group. */
void sum_inputs(const Grouped &weights, long row) {
    const float *from = weights.rows + row * weights.num_inputs;
    const vuint ones = (vuint{} + 0x3f803f80u);
    for (long g = 0; g < weights.num_groups; g++, from += weights.group) {
        vfloat sums{};
        float rest = 0.0f;
        int k = 0;
        for (; k + 2 * LANES <= weights.group; k += 2 * LANES) sums = add_products(sums, rounded_pairs(from + k), ones);
        for (; k < weights.group; k++) rest += bf16_to_float(float_to_bf16(from[k]));
        weights.input_sums[row * weights.num_groups + g] = sum_of(sums) + rest;
    }
}

void fill(void *argument, long pass) {
    Grouped &weights = *static_cast<Grouped *>(argument);
    fill_panel<GROUPED>(static_cast<Product *>(&weights), pass);
    const long passes = num_passes(&weights), end = first_row(&weights, pass + 1, passes);
    if (weights.has_minimum)
        for (long row = first_row(&weights, pass, passes); row < end; row++) sum_inputs(weights, row);
}

}  // namespace

void linear_in_groups(const Product &product) {
    Grouped weights(product);
    run_blocks(fill, &weights, num_passes(&weights), weights.num_threads);
    run_blocks(weights.bits == 4 ? do_block<4> : do_block<8>, &weights, weights.num_blocks(), weights.num_threads);
}
