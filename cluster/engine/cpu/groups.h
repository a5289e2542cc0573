/* Products with weights in groups of few bits, those of models/grouped.py, by rows rounded to 8 bits.
 *
 *     weight[o, i] = scale[o, g] * q[o, i] + minimum[o, g],  g = i / group
 *
 * Inputs are taken in units of 32; what the last unit lacks is 0.  A row's unit has a scale of its own, its greatest
 * absolute value / 127, and 32 integers.  The integers of a unit and of an output's weights are multiplied and summed
 * as integers, exactly; an output is the chain of
 *
 *     sum = fma(scale * row's scale, sum of products, sum);  sum = fma(minimum, row's scale * sum of its integers, sum)
 *
 * over the units in ascending order, in units of two groups over these.  So its bits are the same whatever the
 * instructions, the number of rows and the order in which outputs are computed.
 *
 * In memory: a header of HEADER_BYTES, then blocks of OUTPUTS outputs, the last one padded with zeros.  A block is its
 * units one after the other: float16 scales[halves][OUTPUTS]; float16 minimums[halves][OUTPUTS], if there are any; the
 * integers [8][OUTPUTS][4], four inputs of an output side by side, which is what the instructions take.  Of 4 bits the
 * first half's inputs are the lower bits of the second half's. */
#ifndef DRAFTHOUSE_GROUPS_H
#define DRAFTHOUSE_GROUPS_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

/* Which instructions the compiler knows: GCC compiles for any processor on request, which each source makes; others
 * compile for the one that they are told. */
#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 11
#define HAS_AVX2
#define HAS_AVX_VNNI
#define HAS_AVX512_VNNI
#define HAS_AMX_INT8
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HAS_AVX2
#if defined(__AVXVNNI__)
#define HAS_AVX_VNNI
#endif
#if defined(__AVX512VNNI__)
#define HAS_AVX512_VNNI
#endif
#if defined(__AVX512VNNI__) && defined(__AMX_INT8__)
#define HAS_AMX_INT8
#endif
#elif defined(__aarch64__) && (!defined(__clang__) || defined(__ARM_FEATURE_DOTPROD))
#define HAS_DOTPROD
#endif

namespace groups {

enum {
    HEADER_BYTES = 64,
    OUTPUTS = 16, /* of a block: as many lanes as the widest vectors have */
    UNIT = 32,    /* inputs */
    STEPS = 8,    /* of four inputs */
    CHUNK_ROWS = 64, /* rows that share a pass over a block: what the second level of the cache holds of them */
    AHEAD_BYTES = 2048 /* of the weights, asked for while those before them are computed */
};

/* Of a unit's greatest absolute value: below the one it counts as nothing, above the other it holds no number. */
constexpr float LEAST = 1e-30f, MOST = 3.4028235e38f;

struct Header {
    int32_t bits, halves, has_minimum;
};

/* A unit of a row: its integers, and of both halves their sums and these times the scale; where a group is no smaller
 * than a unit the first ones are of all. */
struct RowUnit {
    int8_t integers[UNIT];
    float scale, sums[2];
    int16_t totals[2];
};

struct Call {
    const float *rows;
    RowUnit *units; /* [chunk][unit][row of the chunk] */
    const uint8_t *blocks;
    const float *bias; /* may be null */
    float *output;
    long num_rows, num_inputs, num_outputs, num_units;
    int bits, halves;
    bool has_minimum;
};

constexpr long unit_bytes(int bits, int halves, bool has_minimum) {
    return halves * (has_minimum ? 2 : 1) * OUTPUTS * 2 + UNIT * OUTPUTS * bits / 8;
}

/* Instructions that products are made with. */
struct Variant {
    const char *name;
    bool (*is_allowed)(); /* by the system; null where it has no say */
    void (*round_row)(const Call &call, long row);
    /* A block's outputs of a chunk of rows. */
    void (*multiply)(const Call &call, long chunk, long block);
};

/* Where a row's units are, from one to the next `stride` apart. */
inline RowUnit *units_of(const Call &call, long row, long *stride) {
    const long chunk = row / CHUNK_ROWS, first = chunk * CHUNK_ROWS;
    *stride = std::min<long>(CHUNK_ROWS, call.num_rows - first);
    return call.units + first * call.num_units + (row - first);
}

}  // namespace groups

#endif
