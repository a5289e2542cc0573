/* Products of groups with AVX2: products of bytes, summed in 16 bits as long as these hold them. */
#include "groups.h"

#if defined(HAS_AVX2)
#pragma GCC target("avx2,fma,f16c")
#include <type_traits>

#include "groups_kernel.h"
#include "groups_ymm.h"

namespace {

struct Avx2 : Ymm {
    /* Of 4 and of 8 bits. */
    struct Nibbles {
        __m256i steps[groups::STEPS];
        void load(const uint8_t *from) { load_nibbles(steps, from); }
    };

    /* Eight sums of two products of at most 15 * 127 fit 16 bits. */
    template <int first, int count>
    static Floats dot(const Nibbles &weights, const groups::RowUnit &unit) {
        __m256i sums = _mm256_maddubs_epi16(weights.steps[first], inputs_of(unit, first));
#pragma GCC unroll 8
        for (int step = first + 1; step < first + count; step++)
            sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights.steps[step], inputs_of(unit, step)));
        return _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
    }

    struct Bytes {
        const uint8_t *from;
        __m256i sizes[groups::STEPS];
        void load(const uint8_t *from_) {
            from = from_;
#pragma GCC unroll 8
            for (int step = 0; step < groups::STEPS; step++) sizes[step] = _mm256_abs_epi8(step_of(from, step));
        }
    };

    /* The weights' signs are given to the inputs, because the instruction takes weights without.  Two products of at most
     * 128 * 127 fit 16 bits, and no more. */
    template <int first, int count>
    static Floats dot(const Bytes &weights, const groups::RowUnit &unit) {
        __m256i sums = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int step = first; step < first + count; step++) {
            const __m256i inputs = _mm256_sign_epi8(inputs_of(unit, step), step_of(weights.from, step));
            const __m256i pairs = _mm256_maddubs_epi16(weights.sizes[step], inputs);
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
        return _mm256_cvtepi32_ps(sums);
    }

    template <int bits>
    using Weights = std::conditional_t<bits == 4, Nibbles, Bytes>;
};

}  // namespace

extern const groups::Variant groups_avx2 = {"avx2", nullptr, groups::round_row<Avx2>, groups::multiply<Avx2>};
#endif
