/* A product of rows with packed weights, y = x W^T + b, and how W stands in memory.
 *
 * W: blocks of BLOCK outputs, the last one padded with zeros; a block is two strips, each for float32
 * [in][2][LANES], else [in / 2][2][LANES][2], an odd number of inputs padded. */
#ifndef PRODUCT_H
#define PRODUCT_H

#include "vectors.h"

enum { VECTORS = 4, BLOCK = VECTORS * LANES, STRIP = 2 * LANES };

typedef struct {
    const float *rows;
    float *panels;
    const void *weight;
    const float *bias;
    float *output;
    long num_rows, num_inputs, num_outputs;
    int num_threads;
} Product;

/* LANES outputs of a row, from `output` on, as far as there are so many. */
INLINE void store_outputs(const Product *product, long row, long output, vfloat sums) {
    float *y = product->output + row * product->num_outputs + output;
    const float *b = product->bias ? product->bias + output : 0;
    if (output + LANES <= product->num_outputs) {
        if (b) sums += *(const vfloat *)b;
        *(vfloat *)y = sums;
        return;
    }
    float lanes[LANES];
    memcpy(lanes, &sums, sizeof lanes);
    for (long i = 0; output + i < product->num_outputs; i++) y[i] = lanes[i] + (b ? b[i] : 0.0f);
}

#endif
