/* The rows of a product, laid out for passes over the weights. */
#ifndef PANELS_H
#define PANELS_H

#include "operations.h"
#include "product.h"
#include "vectors.h"

/* Rows that share a pass over a block: what the registers hold beside the weights. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { NARROW_ROWS = 6, LEAST_WIDE_ROWS = 6, WIDE_ROWS = 12 };
#else
enum { NARROW_ROWS = 2, LEAST_WIDE_ROWS = 2, WIDE_ROWS = 5 };
#endif

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
    return product->panels + row * (rounds_rows(format) ? (inputs + 1) / 2 : inputs);
}

template <int format>
static void fill_panel(void *argument, long pass) {
    const Product *product = static_cast<const Product *>(argument);
    const long passes = num_passes(product), inputs = product->num_inputs;
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
        } else {
            for (long k = 0; k < inputs; k++) panel[k * count + r] = x[k];
        }
    }
}

#endif
