/* Vectors of sixteen floats, and dot products of AVX512-VNNI. */
#ifndef DRAFTHOUSE_GROUPS_ZMM_H
#define DRAFTHOUSE_GROUPS_ZMM_H

#include "groups_x86.h"
#if defined(DRAFTHOUSE_SPELLED) /* a test has AVX-512 written as loops */
#include DRAFTHOUSE_SPELLED
#endif

namespace {

struct Zmm : X86 {
    enum { LANES = 16 };
    typedef __m512 Floats;

    static Floats splat(float value) { return _mm512_set1_ps(value); }
    static Floats load(const float *from) { return _mm512_loadu_ps(from); }
    static void store(float *to, Floats value) { _mm512_storeu_ps(to, value); }
    static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats halves_of(const uint16_t *from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
    }

    /* A step's integers without signs: 128 is added to those of 8 bits, and taken from the sums. */
    template <int bits>
    struct Weights {
        __m512i steps[groups::STEPS];
        void load(const uint8_t *from) {
            const __m512i low = _mm512_set1_epi32(0x0f0f0f0f);
#pragma GCC unroll 8
            for (int step = 0; step < groups::STEPS * bits / 8; step++) {
                const __m512i read = _mm512_loadu_si512(from + step * groups::OUTPUTS * 4);
                if constexpr (bits == 8) {
                    steps[step] = _mm512_xor_si512(read, _mm512_set1_epi32(0x80808080));
                } else {
                    steps[step] = _mm512_and_si512(read, low);
                    steps[step + 4] = _mm512_and_si512(_mm512_srli_epi32(read, 4), low);
                }
            }
        }
    };

    template <int first, int count, int bits>
    static Floats dot(const Weights<bits> &weights, const groups::RowUnit &unit) {
        __m512i sums = _mm512_set1_epi32(bits == 8 ? -128 * unit.totals[first != 0] : 0);
#pragma GCC unroll 8
        for (int step = first; step < first + count; step++) {
            int32_t four;
            memcpy(&four, unit.integers + 4 * step, 4);
            sums = _mm512_dpbusd_epi32(sums, weights.steps[step], _mm512_set1_epi32(four));
        }
        return _mm512_cvtepi32_ps(sums);
    }
};

}  // namespace

#endif
