/* What stands between the products of a layer; row by row, each in one fixed order. */
#include "operations.h"
#include "vectors.h"

/* Vectors of a sum of squares that are added to by turns: one would wait for itself. */
enum { WIDTH = 4 };

INLINE void add_squares(const float *from, vfloat (&sums)[PARTS]) {
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++) {
        const vfloat x = *(const vfloat *)(from + p * LANES);
        sums[p] = fma_of(x, x, sums[p]);
    }
}

/* output = weight * x / sqrt(mean(x^2) + epsilon), row by row. */
extern "C" void rms_norm(const float *rows, const float *weight, float *output, long num_rows, long size,
                         float epsilon) {
    for (long row = 0; row < num_rows; row++, rows += size, output += size) {
        vfloat sums[WIDTH][PARTS] = {};
        long i = 0;
        for (; i + WIDTH * SUM_LANES <= size; i += WIDTH * SUM_LANES)
#pragma GCC unroll 4
            for (int w = 0; w < WIDTH; w++) add_squares(rows + i + w * SUM_LANES, sums[w]);
#pragma GCC unroll 4
        for (int w = 0; w < WIDTH; w++)
            if (i + SUM_LANES <= size) add_squares(rows + i, sums[w]), i += SUM_LANES;
        float rest = 0;
        for (; i < size; i++) rest = fma_of(rows[i], rows[i], rest);
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) sums[0][p] = (sums[0][p] + sums[1][p]) + (sums[2][p] + sums[3][p]);
        const float square = sum_of(sums[0]) + rest;
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

/* cosines, sines [num_positions, 2 * count]: of position * frequency, which is rounded to a float as in the models' own
 * code, times `scaling`.  In double, so that a float is the nearest one, or next to it where two are as near. */
extern "C" void rotations(const float *frequencies, long count, long num_positions, float scaling, float *cosines,
                          float *sines) {
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to a whole number */
    for (long position = 0; position < num_positions; position++, cosines += 2 * count, sines += 2 * count)
        for (long i = 0; i < count; i++) {
            const double angle = (float)position * frequencies[i];
            const double turns = (angle * 0.63661977236758134 + magic) - magic; /* quarters */
            /* A quarter in three parts, the first two of 33 bits. */
            const double rest = ((angle - turns * 1.57079632673412561417) - turns * 6.07710050630396597660e-11) -
                                turns * 2.02226624879595063154e-21;
            const double square = rest * rest;
            double cosine = 1.0, sine = 1.0;
#pragma GCC unroll 8
            for (int k = 16; k > 0; k -= 2) { /* their series, from the end */
                cosine = 1.0 - square * (1.0 / (k * (k - 1))) * cosine;
                sine = 1.0 - square * (1.0 / (k * (k + 1))) * sine;
            }
            sine *= rest;
            const int quarter = (int)((long)turns & 3);
            const float x = (float)(quarter & 1 ? sine : cosine), y = (float)(quarter & 1 ? cosine : sine);
            cosines[i] = cosines[count + i] = (quarter == 1 || quarter == 2 ? -x : x) * scaling;
            sines[i] = sines[count + i] = (quarter >= 2 ? -y : y) * scaling;
        }
}
