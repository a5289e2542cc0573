/* How the variants for x86-64 round rows, with AVX2. */
#ifndef DRAFTHOUSE_GROUPS_X86_H
#define DRAFTHOUSE_GROUPS_X86_H

#include <immintrin.h>

#include "groups.h"

namespace {

struct X86 {
    static int sum_of(__m128i value) {
        value = _mm_add_epi32(value, _mm_shuffle_epi32(value, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(value, _mm_shuffle_epi32(value, 0xb1)));
    }

    static float round_unit(const float *x, int8_t *integers, int *sums) {
        __m256 values[4];
        __m256i most_bits = _mm256_setzero_si256(); /* as integers: what is no number is the greatest */
        for (int i = 0; i < 4; i++) {
            values[i] = _mm256_loadu_ps(x + 8 * i);
            const __m256i size = _mm256_and_si256(_mm256_castps_si256(values[i]), _mm256_set1_epi32(0x7fffffff));
            most_bits = _mm256_max_epi32(most_bits, size);
        }
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most_bits), _mm256_extracti128_si256(most_bits, 1));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
        const float most = _mm_cvtss_f32(_mm_castsi128_ps(four));
        const __m256 inverse = _mm256_set1_ps(most < groups::LEAST ? 0.0f : 127.0f / most);
        __m256i whole[4];
        for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], inverse));
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
        bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        if (!(most <= groups::MOST)) bytes = _mm256_setzero_si256();
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(integers), bytes);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
        const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        sums[0] = sum_of(_mm256_castsi256_si128(fours));
        sums[1] = sum_of(_mm256_extracti128_si256(fours, 1));
        return most / 127.0f;
    }
};

}  // namespace

#endif
