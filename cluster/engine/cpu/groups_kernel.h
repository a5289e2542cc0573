/* The kernel of groups.h, by the `Instructions` of a variant:
 *
 *     LANES                              outputs that a vector holds
 *     Floats, splat, load, store         vectors of them
 *     halves_of(from)                    LANES float16
 *     times(a, b), fma(a, b, c)
 *     Weights<bits>, its load(from)      the eight steps of LANES outputs; `from` is the first of these
 *     dot<first, count>(weights, unit)   Floats: the sums of steps `first` to `first + count` of a row's unit
 *     round_unit(x, integers, sums)      UNIT floats rounded; returns the scale, with the sums of both halves
 *
 * To be included behind the pragma that lets the compiler use them. */
#ifndef DRAFTHOUSE_GROUPS_KERNEL_H
#define DRAFTHOUSE_GROUPS_KERNEL_H

#include "groups.h"

namespace groups {

/* A block's sums of `count` rows from `first` on, with the bias. */
static void store_outputs(const Call &call, long first, long count, long block, const float (*sums)[OUTPUTS]) {
    const long output = block * OUTPUTS, num = std::min<long>(OUTPUTS, call.num_outputs - output);
    for (long row = 0; row < count; row++) {
        float *to = call.output + (first + row) * call.num_outputs + output;
        if (call.bias)
            for (long i = 0; i < num; i++) to[i] = sums[row][i] + call.bias[output + i];
        else
            memcpy(to, sums[row], num * sizeof *to);
    }
}

template <typename Instructions, int bits, int halves, bool has_minimum>
void multiply_block(const Call &call, long chunk, long block) {
    constexpr long BYTES = unit_bytes(bits, halves, has_minimum);
    const long first = chunk * CHUNK_ROWS;
    long count;
    const RowUnit *units = units_of(call, first, &count);
    alignas(64) float sums[CHUNK_ROWS][OUTPUTS];
    memset(sums, 0, count * sizeof sums[0]);
    const uint8_t *from = call.blocks + block * call.num_units * BYTES;
    for (long u = 0; u < call.num_units; u++, from += BYTES, units += count) {
        if (chunk == 0)
            for (long i = 0; i < BYTES; i += 64) __builtin_prefetch(from + AHEAD_BYTES + i, 0, 2);
        const uint16_t *scales = reinterpret_cast<const uint16_t *>(from), *minimums = scales + halves * OUTPUTS;
        const uint8_t *integers = from + halves * (has_minimum ? 2 : 1) * OUTPUTS * 2;
        for (int lane = 0; lane < OUTPUTS; lane += Instructions::LANES) {
            typename Instructions::template Weights<bits> weights;
            weights.load(integers + lane * 4);
            using Floats = typename Instructions::Floats;
            Floats scale[halves], minimum[halves];
            for (int h = 0; h < halves; h++) {
                scale[h] = Instructions::halves_of(scales + h * OUTPUTS + lane);
                if constexpr (has_minimum) minimum[h] = Instructions::halves_of(minimums + h * OUTPUTS + lane);
            }
            for (long row = 0; row < count; row++) {
                const RowUnit &unit = units[row];
                const Floats row_scale = Instructions::splat(unit.scale);
                Floats sum = Instructions::load(sums[row] + lane);
                sum = Instructions::fma(Instructions::times(scale[0], row_scale), Instructions::template dot<0, STEPS / halves>(weights, unit), sum);
                if constexpr (has_minimum) sum = Instructions::fma(minimum[0], Instructions::splat(unit.sums[0]), sum);
                if constexpr (halves == 2) {
                    sum = Instructions::fma(Instructions::times(scale[1], row_scale), Instructions::template dot<STEPS / 2, STEPS / 2>(weights, unit), sum);
                    if constexpr (has_minimum) sum = Instructions::fma(minimum[1], Instructions::splat(unit.sums[1]), sum);
                }
                Instructions::store(sums[row] + lane, sum);
            }
        }
    }
    store_outputs(call, first, count, block, sums);
}

template <typename Instructions>
void multiply(const Call &call, long chunk, long block) {
    const bool has_minimum = call.has_minimum;
    if (call.bits == 4 && call.halves == 1)
        return has_minimum ? multiply_block<Instructions, 4, 1, true>(call, chunk, block) : multiply_block<Instructions, 4, 1, false>(call, chunk, block);
    if (call.bits == 4)
        return has_minimum ? multiply_block<Instructions, 4, 2, true>(call, chunk, block) : multiply_block<Instructions, 4, 2, false>(call, chunk, block);
    if (call.halves == 1)
        return has_minimum ? multiply_block<Instructions, 8, 1, true>(call, chunk, block) : multiply_block<Instructions, 8, 1, false>(call, chunk, block);
    return has_minimum ? multiply_block<Instructions, 8, 2, true>(call, chunk, block) : multiply_block<Instructions, 8, 2, false>(call, chunk, block);
}

template <typename Instructions>
void round_row(const Call &call, long row) {
    long stride;
    RowUnit *unit = units_of(call, row, &stride);
    const float *x = call.rows + row * call.num_inputs;
    for (long left = call.num_inputs; left > 0; left -= UNIT, x += UNIT, unit += stride) {
        float last[UNIT] = {};
        if (left < UNIT) memcpy(last, x, left * sizeof *x);
        int halves[2];
        unit->scale = Instructions::round_unit(left < UNIT ? last : x, unit->integers, halves);
        if (call.halves == 1) halves[0] += halves[1];
        for (int h = 0; h < 2; h++) {
            unit->totals[h] = static_cast<int16_t>(halves[h]);
            unit->sums[h] = unit->scale * static_cast<float>(halves[h]);
        }
    }
}

}  // namespace groups

#endif
