/* Products of groups with AVX-VNNI: sums of four products of bytes in one instruction. */
#include "groups.h"

#if defined(HAS_AVX_VNNI)
#if defined(DRAFTHOUSE_SPELLED) /* a test has the instruction written as a loop */
#pragma GCC target("avx2,fma,f16c")
#include "groups_ymm.h"
#include DRAFTHOUSE_SPELLED
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#include "groups_ymm.h"
#endif

#include "groups_kernel.h"

namespace {

struct AvxVnni : Ymm {
    template <int bits>
    struct Weights {
        __m256i steps[groups::STEPS];
        void load(const uint8_t *from) {
            if constexpr (bits == 4) {
                load_nibbles(steps, from);
            } else {
                /* The instruction takes weights without a sign: 128 is added to them, and taken from the sums. */
#pragma GCC unroll 8
                for (int step = 0; step < groups::STEPS; step++)
                    steps[step] = _mm256_xor_si256(step_of(from, step), _mm256_set1_epi8(-128));
            }
        }
    };

    template <int first, int count, int bits>
    static Floats dot(const Weights<bits> &weights, const groups::RowUnit &unit) {
        __m256i sums = _mm256_set1_epi32(bits == 8 ? -128 * unit.totals[first != 0] : 0);
#pragma GCC unroll 8
        for (int step = first; step < first + count; step++)
            sums = _mm256_dpbusd_avx_epi32(sums, weights.steps[step], inputs_of(unit, step));
        return _mm256_cvtepi32_ps(sums);
    }
};

}  // namespace

extern const groups::Variant groups_avx_vnni = {"avx-vnni", nullptr, groups::round_row<AvxVnni>, groups::multiply<AvxVnni>};
#endif
