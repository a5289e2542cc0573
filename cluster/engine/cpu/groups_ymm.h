/* Vectors of eight floats, of the variants with AVX2. */
#ifndef DRAFTHOUSE_GROUPS_YMM_H
#define DRAFTHOUSE_GROUPS_YMM_H

#include "groups_x86.h"

namespace {

struct Ymm : X86 {
    enum { LANES = 8 };
    typedef __m256 Floats;

    static Floats splat(float value) { return _mm256_set1_ps(value); }
    static Floats load(const float *from) { return _mm256_load_ps(from); }
    static void store(float *to, Floats value) { _mm256_store_ps(to, value); }
    static Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats halves_of(const uint16_t *from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    }

    /* A step's four inputs, beside each of the outputs. */
    static __m256i inputs_of(const groups::RowUnit &unit, int step) {
        int32_t four;
        memcpy(&four, unit.integers + 4 * step, 4);
        return _mm256_set1_epi32(four);
    }

    /* The integers of step `step` as they stand in memory. */
    static __m256i step_of(const uint8_t *from, int step) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + step * groups::OUTPUTS * 4));
    }

    /* Integers of four bits, widened. */
    static void load_nibbles(__m256i (&steps)[groups::STEPS], const uint8_t *from) {
        const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 4
        for (int i = 0; i < groups::STEPS / 2; i++) {
            const __m256i both = step_of(from, i);
            steps[i] = _mm256_and_si256(both, low);
            steps[i + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
    }
};

}  // namespace

#endif
