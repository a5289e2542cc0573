/* Weights in groups of few bits in the processor's tiles (AMX): a group of a block is widened to bfloat16 in memory
 * that stays in the first level of the cache, as tiles read it, and multiplied with 16 rows at once; the sums of the
 * group are then scaled and added in vectors, as grouped.h says, whatever the number of rows. */
#ifndef GROUP_TILES_H
#define GROUP_TILES_H

#include "amx.h"
#include "grouped.h"
#include "pool.h"
#include "tiles.h"

#if defined(__AMX_BF16__) && defined(__linux__)

/* Inputs of a group at most; rows that share what was widened. */
enum { MOST_INPUTS = 128, SHARING_ROWS = 4 * TILE_ROWS };

static bool multiplies_groups_in_tiles(long group) {
    return has_tiles && group % TILE_INPUTS == 0 && group <= MOST_INPUTS;
}

/* partial[TILE_ROWS][VECTORS] = as many rows as tiles are shaped for, of `inputs` bfloat16 each, the group's first
 * ones at x, by the group's weights, widened[group / 2][VECTORS]. */
static void multiply_group(const uint16_t *x, long inputs, long group, const vuint *widened, vfloat *partial) {
    enum { ROW_BYTES = VECTORS * LANES * 4 };
    __asm__ volatile("" ::: "memory"); /* GCC does not know that the next lines read memory */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < group; k += TILE_INPUTS, widened += TILE_INPUTS / 2 * VECTORS) {
        _tile_loadd(4, x + k, inputs * 2);
        _tile_loadd(6, widened, ROW_BYTES);
        _tile_loadd(7, widened + 1, ROW_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, widened + 2, ROW_BYTES);
        _tile_loadd(7, widened + 3, ROW_BYTES);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, partial, ROW_BYTES);
    _tile_stored(1, partial + 1, ROW_BYTES);
    _tile_stored(2, partial + 2, ROW_BYTES);
    _tile_stored(3, partial + 3, ROW_BYTES);
    __asm__ volatile("" ::: "memory"); /* nor that they wrote some */
}

/* The rows from `start` to `end` by a block; `count` of them, as many as a tile has, are multiplied at once. */
template <int format>
static void tile_groups(const Product *product, long block, long start, long end, int count) {
    const Groups<format> groups(product);
    const long inputs = product->num_inputs;
    const uint8_t *from = groups.of_block(block);
    alignas(64) vuint widened[MOST_INPUTS / 2 * VECTORS];
    alignas(64) vfloat sums[SHARING_ROWS * VECTORS], partial[TILE_ROWS * VECTORS];
    for (long i = 0; i < (end - start) * VECTORS; i++) sums[i] = vfloat{};
    for (long g = 0; g < groups.count; g++, from += groups.bytes) {
        groups.ask_ahead(product, block, from, groups.ahead());
        for_pairs<bits_of(format), VECTORS>(from + groups.SCALE_BYTES, 0, groups.group, [&](long k, int v, vuint pairs) {
            widened[k * VECTORS + v] = pairs;
        });
        const Scales<VECTORS, format> scales(from, 0);
        for (long row = start; row < end; row += count) {
            /* The last rows may have been computed before: then their sums are not added again. */
            const long first = row + count <= end ? row : end - count;
            const uint16_t *x = reinterpret_cast<const uint16_t *>(product->panels) + first * inputs;
            multiply_group(x + g * groups.group, inputs, groups.group, widened, partial);
            for (long each = row; each < first + count; each++)
                for (int v = 0; v < VECTORS; v++)
                    scales.add(v, partial[(each - first) * VECTORS + v], groups.input_sums[each * groups.count + g],
                               sums[(each - start) * VECTORS + v]);
        }
    }
    for (long row = start; row < end; row++)
        for (int v = 0; v < VECTORS; v++)
            store_outputs(product, row, block * BLOCK + v * LANES, sums[(row - start) * VECTORS + v]);
}

template <int format>
static void do_group_tiles(void *argument, long block) {
    const Product *product = static_cast<const Product *>(argument);
    const long num_rows = product->num_rows;
    const int count = (int)(num_rows < TILE_ROWS ? num_rows : TILE_ROWS);
    shape_tiles({count, count, count, count}, count, 0);
    for (long start = 0; start < num_rows; start += SHARING_ROWS)
        tile_groups<format>(product, block, start, start + SHARING_ROWS < num_rows ? start + SHARING_ROWS : num_rows, count);
    release_tiles();
}

template <int format>
static void round_and_sum_rows(void *argument, long part) {
    const Product *product = static_cast<const Product *>(argument);
    round_rows(argument, part);
    if constexpr (has_minimum(format))
        for (long row = part * TILE_ROWS; row < product->num_rows && row < (part + 1) * TILE_ROWS; row++)
            sum_inputs<format>(product, row);
}

template <int format>
static void groups_in_tiles(Product product) {
    run_blocks(round_and_sum_rows<format>, &product, (product.num_rows + TILE_ROWS - 1) / TILE_ROWS, product.num_threads);
    run_blocks(do_group_tiles<format>, &product, (product.num_outputs + BLOCK - 1) / BLOCK, product.num_threads);
}

#else
static bool multiplies_groups_in_tiles(long) { return false; }
template <int format>
static void groups_in_tiles(Product) {}
#endif

#endif
