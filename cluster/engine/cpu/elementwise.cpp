/* What stands between the products of a layer; row by row, each in one fixed order. */
#include "operations.h"
#include "vectors.h"

/* output = weight * x / sqrt(mean(x^2) + epsilon), row by row. */
extern "C" void rms_norm(const float *rows, const float *weight, float *output, long num_rows, long size,
                         float epsilon) {
    for (long row = 0; row < num_rows; row++, rows += size, output += size) {
        vfloat sums[4] = {};
        long i = 0;
        for (; i + 4 * LANES <= size; i += 4 * LANES)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) {
                const vfloat x = *(const vfloat *)(rows + i + v * LANES);
                sums[v] += x * x;
            }
        float rest = 0;
        for (; i < size; i++) rest += rows[i] * rows[i];
        const float square = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
        const float scale = 1.0f / std::sqrt(square / (float)size + epsilon);
        for (i = 0; i + LANES <= size; i += LANES)
            *(vfloat *)(output + i) = *(const vfloat *)(weight + i) * (*(const vfloat *)(rows + i) * splat(scale));
        for (; i < size; i++) output[i] = weight[i] * (rows[i] * scale);
    }
}

/* rows [.., 2 * size]: gates, then what they gate.  output = silu(gate) * other, [.., size]. */
extern "C" void silu_product(const float *rows, float *output, long num_rows, long size) {
    for (long row = 0; row < num_rows; row++, rows += 2 * size, output += size) {
        const float *other = rows + size;
        long i = 0;
        for (; i + LANES <= size; i += LANES) {
            const vfloat gate = *(const vfloat *)(rows + i);
            *(vfloat *)(output + i) = gate / (splat(1.0f) + exp_of(-gate)) * *(const vfloat *)(other + i);
        }
        for (; i < size; i++) {
            const float gate = rows[i];
            output[i] = gate / (1.0f + exp_of(-gate)) * other[i];
        }
    }
}
