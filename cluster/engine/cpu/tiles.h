/* Products of bfloat16 in the processor's tiles (AMX): 16 rows by 16 outputs by 32 inputs in one instruction,
 * so that 16 rows cost what reading the weights does.
 *
 * The weights stand in memory as `linear.cpp` lays them out; rows are rounded to bfloat16, one after the other.
 * An output is summed over the inputs in ascending order, whatever the number of rows and wherever a row stands. */
#ifndef TILES_H
#define TILES_H

#include "operations.h"
#include "pool.h"
#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE_ROWS = 16, TILE_INPUTS = 32 };

/* Linux lets a process use tiles once it has asked for their state (arch_prctl's manual). */
static bool ask_for_tiles() {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
static const bool has_tiles = ask_for_tiles();

static bool multiplies_in_tiles(int format, long num_inputs) {
    return has_tiles && format == BF16_PRODUCTS && num_inputs % TILE_INPUTS == 0;
}

/* Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights. */
enum { NUM_SUMS = 4 };

static void shape_tiles(const int (&sum_rows)[NUM_SUMS], int first_rows, int second_rows) {
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t num_rows[16];
    } shape = {};
    shape.palette = 1;
    const int num_rows[] = {sum_rows[0], sum_rows[1], sum_rows[2], sum_rows[3],
                            first_rows,  second_rows, TILE_ROWS,   TILE_ROWS};
    for (int tile = 0; tile < 8; tile++) {
        shape.row_bytes[tile] = num_rows[tile] ? 64 : 0;
        shape.num_rows[tile] = (uint8_t)num_rows[tile];
    }
    __asm__ volatile("" ::"r"(&shape) : "memory"); /* GCC takes the next line to read its first 8 bytes alone */
    _tile_loadconfig(&shape);
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
        for (long step = AHEAD; step < AHEAD + TILE_INPUTS / 2; step++)
            for (long from = step * STRIP; from < 2 * strip; from += strip) {
                __builtin_prefetch(w + from, 0, 2);
                __builtin_prefetch(w + from + LANES, 0, 2);
            }
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
        if (row == 0)
            for (long step = AHEAD; step < AHEAD + TILE_INPUTS / 2; step++) {
                __builtin_prefetch(w + step * STRIP, 0, 2);
                __builtin_prefetch(w + step * STRIP + LANES, 0, 2);
            }
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
    _tile_release();
}

static void round_rows(void *argument, long part) {
    const Product *product = static_cast<const Product *>(argument);
    const long inputs = product->num_inputs;
    for (long row = part * TILE_ROWS; row < product->num_rows && row < (part + 1) * TILE_ROWS; row++)
        round_to_bf16(product->rows + row * inputs, (uint16_t *)product->panels + row * inputs, inputs);
}

static void multiply_in_tiles(Product product) {
    run_blocks(round_rows, &product, (product.num_rows + TILE_ROWS - 1) / TILE_ROWS, product.num_threads);
    run_blocks(do_tiles, &product, (product.num_outputs + BLOCK - 1) / BLOCK, product.num_threads);
}

#else
static bool multiplies_in_tiles(int, long) { return false; }
static void multiply_in_tiles(Product) {}
#endif

#endif
