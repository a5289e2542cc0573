/* Products of groups in plain C++: what the variants with instructions of their own are compared with. */
#include "groups_kernel.h"

namespace {

struct C {
    enum { LANES = 16 };

    struct Floats {
        float lanes[LANES];
    };

    template <typename Function>
    static Floats each(const Function &function) {
        Floats result;
        for (int i = 0; i < LANES; i++) result.lanes[i] = function(i);
        return result;
    }

    static Floats splat(float value) {
        return each([&](int) { return value; });
    }
    static Floats load(const float *from) {
        return each([&](int i) { return from[i]; });
    }
    static void store(float *to, const Floats &value) { memcpy(to, value.lanes, sizeof value.lanes); }
    static Floats times(const Floats &a, const Floats &b) {
        return each([&](int i) { return a.lanes[i] * b.lanes[i]; });
    }
    static Floats fma(const Floats &a, const Floats &b, const Floats &c) {
        return each([&](int i) { return std::fma(a.lanes[i], b.lanes[i], c.lanes[i]); });
    }

    /* Finite float16. */
    static Floats halves_of(const uint16_t *from) {
        return each([&](int i) {
            const int sign = from[i] >> 15, exponent = from[i] >> 10 & 31, fraction = from[i] & 1023;
            const float size = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp((float)fraction, -24);
            return sign ? -size : size;
        });
    }

    template <int bits>
    struct Weights {
        int integers[groups::STEPS][LANES][4];
        void load(const uint8_t *from) {
            for (int step = 0; step < groups::STEPS; step++)
                for (int i = 0; i < LANES * 4; i++) {
                    const uint8_t byte = from[(bits == 4 ? step % 4 : step) * LANES * 4 + i];
                    integers[step][i / 4][i % 4] = bits == 8 ? (int8_t)byte : step < 4 ? byte & 15 : byte >> 4;
                }
        }
    };

    template <int first, int count, int bits>
    static Floats dot(const Weights<bits> &weights, const groups::RowUnit &unit) {
        return each([&](int i) {
            int sum = 0;
            for (int step = first; step < first + count; step++)
                for (int k = 0; k < 4; k++) sum += weights.integers[step][i][k] * unit.integers[step * 4 + k];
            return (float)sum;
        });
    }

    /* A unit whose greatest value's reciprocal is infinite counts as nothing; one that holds no number, or an infinite one,
     * has such a scale. */
    static float round_unit(const float *x, int8_t *integers, int *sums) {
        float most = 0.0f;
        for (int i = 0; i < groups::UNIT; i++) {
            const float size = std::fabs(x[i]);
            if (!(size <= most)) most = size;
            if (std::isnan(most)) break;
        }
        const float inverse = most < groups::LEAST ? 0.0f : 127.0f / most;
        sums[0] = sums[1] = 0;
        for (int i = 0; i < groups::UNIT; i++) {
            integers[i] = most <= groups::MOST ? (int8_t)std::lrint(x[i] * inverse) : 0;
            sums[i / 16] += integers[i];
        }
        return most / 127.0f;
    }
};

}  // namespace

extern const groups::Variant groups_c = {"c", nullptr, groups::round_row<C>, groups::multiply<C>};
