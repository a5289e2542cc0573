/* Weights in groups of few bits, those of models/grouped.py: how they stand in memory, and become bfloat16.
 *
 *     weight[o, i] = scale[o, g] * q[o, i] + minimum[o, g],  g = i / group
 *
 * A header of HEADER_BYTES, then blocks of BLOCK outputs, the last one padded with zeros.  A block is its groups
 * one after the other: float16 scales[BLOCK]; float16 minimums[BLOCK], if there are any; the integers.
 * Those of 8 bits: [group / 2][VECTORS][LANES][2].  Those of 4 bits: [group / 8][VECTORS][LANES] of 32 bits,
 * whose lower half holds the inputs 0, 2, 4, 6 of the eight and whose upper half the others, the lowest bits first. */
#ifndef GROUPED_H
#define GROUPED_H

#include "panels.h"
#include "product.h"
#include "vectors.h"

enum { HEADER_BYTES = 64, MAX_GROUP = 128 };

struct Grouped : Product {
    struct Header { int32_t bits, group, has_minimum; };
    int bits, group;
    bool has_minimum;
    long num_groups, group_bytes, block_bytes;
    /* Of each row, rounded, and group: [num_rows][num_groups], behind the panels, which take half of their room. */
    float *input_sums;

    explicit Grouped(const Product &product) : Product(product) {
        const Header *header = static_cast<const Header *>(weight);
        bits = header->bits, group = header->group, has_minimum = header->has_minimum;
        num_groups = num_inputs / group;
        group_bytes = (has_minimum ? 2 : 1) * BLOCK * 2 + BLOCK * group * bits / 8;
        block_bytes = num_groups * group_bytes;
        input_sums = panels + num_rows * (num_inputs / 2);
    }
    const uint8_t *block(long number) const { return static_cast<const uint8_t *>(weight) + HEADER_BYTES + number * block_bytes; }
    const uint8_t *integers(const uint8_t *of_group) const { return of_group + (has_minimum ? 2 : 1) * BLOCK * 2; }
    long num_blocks() const { return (num_outputs + BLOCK - 1) / BLOCK; }

    /* Ask for what is `ahead` bytes behind a group: of this block, or of the thread's next one. */
    INLINE_MEMBER void ask_ahead(const uint8_t *of_group, const uint8_t *end, long ahead) const {
        const uint8_t *later = of_group + ahead;
        if (later >= end) later += (num_threads - 1) * block_bytes;
        for (long i = 0; i < group_bytes; i += 64) __builtin_prefetch(later + i, 0, 2);
    }
};

/* What a group's sums are multiplied by, and what is added for the row's inputs there. */
struct Scales {
    vfloat scales[VECTORS], minimums[VECTORS];
    INLINE_MEMBER Scales(const Grouped &weights, const uint8_t *of_group) {
        const uint16_t *from = reinterpret_cast<const uint16_t *>(of_group);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            scales[v] = load_halves(from + v * LANES);
            minimums[v] = weights.has_minimum ? load_halves(from + BLOCK + v * LANES) : vfloat{};
        }
    }
};

/* Inputs 2 * number and 2 * number + 1 of each word's eight, as bfloat16. */
template <int number>
INLINE vuint widened_nibbles(vuint words) {
#if defined(__AVX512BF16__)
    /* The instruction looks at the lower five bits of an index; one of them is the next number's. */
    alignas(64) static const uint16_t TABLE[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    return (vuint)_mm512_permutexvar_epi16((__m512i)(words >> 4 * number), _mm512_load_si512(TABLE));
#else
    const vuint numbers = words >> 4 * number;
    const vfloat even = __builtin_convertvector((vint)(numbers & 15), vfloat);
    const vfloat odd = __builtin_convertvector((vint)(numbers >> 16 & 15), vfloat);
    return (vuint)even >> 16 | (vuint)odd; /* a float of few bits is its upper half */
#endif
}

/* function(k, v, pairs) for every two inputs k of a group and every vector v of the block's outputs. */
template <int bits, typename Function>
INLINE void for_pairs(const uint8_t *integers, int group, const Function &function) {
    if constexpr (bits == 4) {
        const vuint *from = reinterpret_cast<const vuint *>(integers);
        for (int k = 0; k < group / 2; k += 4, from += VECTORS) {
            vuint words[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) words[v] = from[v];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) function(k, v, widened_nibbles<0>(words[v]));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) function(k + 1, v, widened_nibbles<1>(words[v]));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) function(k + 2, v, widened_nibbles<2>(words[v]));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) function(k + 3, v, widened_nibbles<3>(words[v]));
        }
    } else {
        const int8_t *from = reinterpret_cast<const int8_t *>(integers);
        for (int k = 0; k < group / 2; k++, from += 2 * BLOCK)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) function(k, v, widened_pairs(from + v * 2 * LANES));
    }
}

#endif
