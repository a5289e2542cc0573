/* Products of bfloat16 in the processor's tiles (AMX): 16 rows by 16 outputs by 32 inputs in one instruction,
 * so that 16 rows cost what reading the weights does.
 *
 * The weights stand in memory as product.h says; rows are rounded to bfloat16, one after the other.
 * An output is summed over the inputs in ascending order, whatever the number of rows and wherever a row stands. */
#ifndef TILES_H
#define TILES_H

#include "amx.h"
#include "operations.h"
#include "pool.h"
#include "product.h"
#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__)

static bool multiplies_in_tiles(int format, long num_inputs) {
    return has_tiles && format == BF16_PRODUCTS && num_inputs % TILE_INPUTS == 0;
}

/* The sums of tile `tile`: `count` rows from `row` on, LANES outputs from `output` on. */
template <int tile>
static void store_sums(const Product *product, long row, int count, long output) {
    alignas(64) float sums[TILE_ROWS][LANES];
    /* The instructions' macros take the tile's number to the letter. */
    if constexpr (tile == 0) _tile_stored(0, sums, sizeof sums[0]);
    if constexpr (tile == 1) _tile_stored(1, sums, sizeof sums[0]);
    if constexpr (tile == 2) _tile_stored(2, sums, sizeof sums[0]);
    if constexpr (tile == 3) _tile_stored(3, sums, sizeof sums[0]);
    for (int r = 0; r < count; r++) store_outputs(product, row + r, output, *(const vfloat *)sums[r]);
}

/* All outputs of a block, for at most TILE_ROWS rows. */
static void narrow_tiles(const Product *product, long block) {
    const long inputs = product->num_inputs, strip = inputs / 2 * STRIP;
    const int count = (int)product->num_rows;
    const uint32_t *w = (const uint32_t *)product->weight + block * 2 * strip;
    const uint16_t *x = (const uint16_t *)product->panels;
    shape_tiles({count, count, count, count}, count, 0);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += TILE_INPUTS, w += TILE_INPUTS / 2 * STRIP) {
        _tile_loadd(4, x + k, inputs * 2);
        _tile_loadd(6, w, STRIP * 4);
        _tile_loadd(7, w + LANES, STRIP * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, w + strip, STRIP * 4);
        _tile_loadd(7, w + strip + LANES, STRIP * 4);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
    }
    const long output = block * BLOCK;
    store_sums<0>(product, 0, count, output);
    store_sums<1>(product, 0, count, output + LANES);
    store_sums<2>(product, 0, count, output + 2 * LANES);
    store_sums<3>(product, 0, count, output + 3 * LANES);
}

/* One strip's outputs, from `output` on, for TILE_ROWS rows from `row` on and `more` behind them. */
template <bool has_more>
static void wide_tiles(const Product *product, const uint32_t *w, long row, int more, long output) {
    const long inputs = product->num_inputs;
    const uint16_t *x = (const uint16_t *)product->panels + row * inputs, *y = x + TILE_ROWS * inputs;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (has_more) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < inputs; k += TILE_INPUTS, w += TILE_INPUTS / 2 * STRIP) {
        _tile_loadd(6, w, STRIP * 4);
        _tile_loadd(7, w + LANES, STRIP * 4);
        _tile_loadd(4, x + k, inputs * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (has_more) {
            _tile_loadd(5, y + k, inputs * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    store_sums<0>(product, row, TILE_ROWS, output);
    store_sums<1>(product, row, TILE_ROWS, output + LANES);
    if constexpr (has_more) {
        store_sums<2>(product, row + TILE_ROWS, more, output);
        store_sums<3>(product, row + TILE_ROWS, more, output + LANES);
    }
}

static void do_tiles(void *argument, long block) {
    const Product *product = static_cast<const Product *>(argument);
    const long strip = product->num_inputs / 2 * STRIP, num_rows = product->num_rows;
    if (num_rows <= TILE_ROWS) {
        narrow_tiles(product, block);
    } else {
        for (int half = 0; half < 2; half++) {
            const uint32_t *w = (const uint32_t *)product->weight + (block * 2 + half) * strip;
            const long output = block * BLOCK + half * STRIP;
            int shaped = -1;
            for (long row = 0; row < num_rows; row += 2 * TILE_ROWS) {
                /* The last rows may have been computed before: a tile of fewer rows saves nothing. */
                const long from = row + TILE_ROWS <= num_rows ? row : num_rows - TILE_ROWS;
                const long rest = num_rows - from - TILE_ROWS;
                const int more = (int)(rest < TILE_ROWS ? rest : TILE_ROWS);
                if (more != shaped) shape_tiles({TILE_ROWS, TILE_ROWS, more, more}, TILE_ROWS, more);
                shaped = more;
                if (more)
                    wide_tiles<true>(product, w, from, more, output);
                else
                    wide_tiles<false>(product, w, from, 0, output);
            }
        }
    }
    release_tiles();
}

static void round_rows(void *argument, long part) {
    const Product *product = static_cast<const Product *>(argument);
    const long inputs = product->num_inputs;
    for (long row = part * TILE_ROWS; row < product->num_rows && row < (part + 1) * TILE_ROWS; row++)
        round_to_bf16(product->rows + row * inputs, (uint16_t *)product->panels + row * inputs, inputs);
}

static void linear_in_tiles(Product product) {
    run_blocks(round_rows, &product, (product.num_rows + TILE_ROWS - 1) / TILE_ROWS, product.num_threads);
    run_blocks(do_tiles, &product, (product.num_outputs + BLOCK - 1) / BLOCK, product.num_threads, NEIGHBOURS);
}

#else
static bool multiplies_in_tiles(int, long) { return false; }
static void linear_in_tiles(Product) {}
#endif

#endif
