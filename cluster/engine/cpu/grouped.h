/* Products with weights in groups of few bits, those of models/grouped.py, by rows rounded to bfloat16.
 *
 *     weight[o, i] = scale[o, g] * q[o, i] + minimum[o, g],  g = i / group
 *
 * A header of HEADER_BYTES, then blocks of BLOCK outputs, the last one padded with zeros.  A block is its groups
 * one after the other: float16 scales[BLOCK]; float16 minimums[BLOCK], if there are any; the integers.
 * Those of 8 bits: [group / 2][VECTORS][LANES][2].  Those of 4 bits: [group / 8][VECTORS][LANES] of 32 bits,
 * whose lower half holds the inputs 0, 2, 4, 6 of the eight and whose upper half the others, the lowest bits first.
 *
 * The integers become bfloat16 in registers, which holds them exactly, and are multiplied with a row's inputs into a
 * sum of the group; an output is the chain of
 *
 *     sum += scale * sum of the group;  sum += minimum * sum of the row's inputs in the group
 *
 * over the groups in ascending order. */
#ifndef GROUPED_H
#define GROUPED_H

#include "operations.h"
#include "product.h"
#include "vectors.h"

/* AHEAD_INPUTS: whose weights are asked for ahead. */
enum { HEADER_BYTES = 64, AHEAD_INPUTS = 128 };

/* What a weight's header says, as linear.cpp's functions are made for it: in place of GROUPED itself. */
constexpr int grouped_format(int bits, bool has_minimum) { return GROUPED + bits + has_minimum; }
constexpr bool is_grouped(int format) { return format > GROUPED; }
constexpr int bits_of(int format) { return (format - GROUPED) & ~1; }
constexpr bool has_minimum(int format) { return is_grouped(format) && (format - GROUPED) & 1; }

struct GroupedHeader {
    int32_t bits, group, has_minimum;
};

template <int format>
struct Groups {
    enum { SCALE_BYTES = (has_minimum(format) ? 2 : 1) * BLOCK * 2 };
    long group, count, bytes; /* inputs of one, how many, and bytes of one with a block's outputs */
    const uint8_t *blocks;
    float *input_sums; /* [num_rows][count], behind the panels, which take half of their room */

    explicit Groups(const Product *product) {
        group = static_cast<const GroupedHeader *>(product->weight)->group;
        count = product->num_inputs / group;
        bytes = SCALE_BYTES + BLOCK * group * bits_of(format) / 8;
        blocks = static_cast<const uint8_t *>(product->weight) + HEADER_BYTES;
        input_sums = product->panels + product->num_rows * (product->num_inputs / 2);
    }
    long ahead() const { return AHEAD_INPUTS / group * bytes; }
    const uint8_t *of_block(long block) const { return blocks + block * count * bytes; }

    /* Ask for the weights `ahead` bytes behind a group's, in its block or the thread's next one. */
    INLINE_MEMBER void ask_ahead(const Product *product, long block, const uint8_t *of_group, long ahead) const {
        const uint8_t *later = of_group + ahead;
        if (later >= of_block(block + 1)) later += (product->num_threads - 1) * count * bytes;
        for (long i = 0; i < bytes; i += 64) __builtin_prefetch(later + i, 0, 2);
    }
};

/* What the sums of a group are multiplied by, and its inputs' sums, for vectors of outputs from `first` on. */
template <int num_vectors, int format>
struct Scales {
    vfloat scales[num_vectors], minimums[num_vectors];
    INLINE_MEMBER Scales(const uint8_t *of_group, int first) {
        const uint16_t *from = reinterpret_cast<const uint16_t *>(of_group) + first * LANES;
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) {
            scales[v] = load_halves(from + v * LANES);
            if constexpr (has_minimum(format)) minimums[v] = load_halves(from + BLOCK + v * LANES);
        }
    }
    INLINE_MEMBER void add(int v, vfloat partial, const float &inputs, vfloat &sum) const {
        sum += scales[v] * partial;
        if constexpr (has_minimum(format)) sum += minimums[v] * splat(inputs);
    }
};

/* The sums of a row's inputs, rounded, over each group. */
template <int format>
static void sum_inputs(const Product *product, long row) {
    const Groups<format> groups(product);
    const float *from = product->rows + row * product->num_inputs;
    for (long g = 0; g < groups.count; g++, from += groups.group) {
        vfloat sums{};
        float rest = 0.0f;
        long k = 0;
        for (; k + 2 * LANES <= groups.group; k += 2 * LANES)
            sums = add_products(sums, rounded_pairs(from + k), vuint{} + 0x3f803f80u); /* ones */
        for (; k < groups.group; k++) rest += bf16_to_float(float_to_bf16(from[k]));
        groups.input_sums[row * groups.count + g] = sum_of(sums) + rest;
    }
}

/* Inputs 2 * number and 2 * number + 1 of each word's eight, as bfloat16. */
INLINE vuint widened_nibbles(vuint words, int number) {
    const vuint shifted = words >> 4 * number;
#if defined(__AVX512BF16__)
    /* The instruction looks at the lower five bits of an index; one of them is the next number's. */
    alignas(64) static const uint16_t TABLE[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    return (vuint)_mm512_permutexvar_epi16((__m512i)shifted, _mm512_load_si512(TABLE));
#else
    const vfloat even = __builtin_convertvector((vint)(shifted & 15), vfloat);
    const vfloat odd = __builtin_convertvector((vint)(shifted >> 16 & 15), vfloat);
    return (vuint)even >> 16 | (vuint)odd; /* a float of few bits is its upper half */
#endif
}

/* function(k, v, pairs) for every two inputs k of a group and `num_vectors` vectors v of outputs. */
template <int bits, int num_vectors, typename Function>
INLINE void for_pairs(const uint8_t *integers, int first, long group, const Function &function) {
    if constexpr (bits == 4) {
        const vuint *from = reinterpret_cast<const vuint *>(integers) + first;
        for (long k = 0; k < group / 2; k += 4, from += VECTORS) {
            vuint words[num_vectors];
#pragma GCC unroll 4
            for (int v = 0; v < num_vectors; v++) words[v] = from[v];
#pragma GCC unroll 4
            for (int number = 0; number < 4; number++)
#pragma GCC unroll 4
                for (int v = 0; v < num_vectors; v++) function(k + number, v, widened_nibbles(words[v], number));
        }
    } else {
        const int8_t *from = reinterpret_cast<const int8_t *>(integers) + first * 2 * LANES;
        for (long k = 0; k < group / 2; k++, from += 2 * BLOCK)
#pragma GCC unroll 4
            for (int v = 0; v < num_vectors; v++) function(k, v, widened_pairs(from + v * 2 * LANES));
    }
}

/* One pass's `num_rows` rows, with `pairs` of their inputs, by `num_vectors` vectors of outputs, the first one `first`
 * of the block; of the weights those `ahead` bytes behind each group's are asked for, in this block or the thread's
 * next one. */
template <int num_rows, int num_vectors, int format>
INLINE void multiply_groups(const Product *product, long block, const uint32_t *pairs, long row, int first, long ahead,
                            vfloat (&sums)[num_rows][num_vectors]) {
    const Groups<format> groups(product);
    const uint8_t *from = groups.of_block(block), *end = groups.of_block(block + 1);
    const float *inputs = groups.input_sums + row * groups.count;
    for (; from < end; from += groups.bytes, pairs += groups.group / 2 * num_rows, inputs++) {
        groups.ask_ahead(product, block, from, ahead);
        vfloat partial[num_rows][num_vectors];
#pragma GCC unroll 16
        for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < num_vectors; v++) partial[r][v] = vfloat{};
        const uint8_t *integers = from + groups.SCALE_BYTES;
        for_pairs<bits_of(format), num_vectors>(integers, first, groups.group, [&](long k, int v, vuint widened) {
#pragma GCC unroll 16
            for (int r = 0; r < num_rows; r++)
                partial[r][v] = add_products(partial[r][v], pairs[k * num_rows + r] - vuint{}, widened);
        });
        const Scales<num_vectors, format> scales(from, first);
#pragma GCC unroll 16
        for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < num_vectors; v++) scales.add(v, partial[r][v], inputs[r * groups.count], sums[r][v]);
    }
}

#endif
