/* Products of groups with the dot products of ARM's NEON. */
#include "groups.h"

#if defined(HAS_DOTPROD)
#pragma GCC target("arch=armv8.2-a+dotprod")
#include <arm_neon.h>

#include "groups_kernel.h"

namespace {

struct Dotprod {
    enum { LANES = 4 };
    typedef float32x4_t Floats;

    static Floats splat(float value) { return vdupq_n_f32(value); }
    static Floats load(const float *from) { return vld1q_f32(from); }
    static void store(float *to, Floats value) { vst1q_f32(to, value); }
    static Floats times(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
    static Floats halves_of(const uint16_t *from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }

    template <int bits>
    struct Weights {
        int8x16_t steps[groups::STEPS];
        void load(const uint8_t *from) {
#pragma GCC unroll 8
            for (int step = 0; step < groups::STEPS * bits / 8; step++) {
                const uint8x16_t read = vld1q_u8(from + step * groups::OUTPUTS * 4);
                if constexpr (bits == 8) {
                    steps[step] = vreinterpretq_s8_u8(read);
                } else {
                    steps[step] = vreinterpretq_s8_u8(vandq_u8(read, vdupq_n_u8(15)));
                    steps[step + 4] = vreinterpretq_s8_u8(vshrq_n_u8(read, 4));
                }
            }
        }
    };

    template <int first, int count, int bits>
    static Floats dot(const Weights<bits> &weights, const groups::RowUnit &unit) {
        int32x4_t sums = vdupq_n_s32(0);
#pragma GCC unroll 8
        for (int step = first; step < first + count; step++) {
            int32_t four;
            memcpy(&four, unit.integers + 4 * step, 4);
            sums = vdotq_s32(sums, weights.steps[step], vreinterpretq_s8_s32(vdupq_n_s32(four)));
        }
        return vcvtq_f32_s32(sums);
    }

    static float round_unit(const float *x, int8_t *integers, int *sums) {
        uint32x4_t most_bits = vdupq_n_u32(0); /* as integers: what is no number is the greatest */
        for (int i = 0; i < groups::UNIT; i += 4)
            most_bits = vmaxq_u32(most_bits, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), vdupq_n_u32(0x7fffffff)));
        const uint32_t greatest = vmaxvq_u32(most_bits);
        float most;
        memcpy(&most, &greatest, 4);
        const float inverse = most < groups::LEAST ? 0.0f : 127.0f / most;
        sums[0] = sums[1] = 0;
        for (int i = 0; i < groups::UNIT; i += 8) {
            const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), inverse));
            const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4), inverse));
            const int8x8_t bytes = vmovn_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high)));
            vst1_s8(integers + i, bytes);
            sums[i / 16] += vaddlv_s8(bytes);
        }
        if (!(most <= groups::MOST)) {
            memset(integers, 0, groups::UNIT);
            sums[0] = sums[1] = 0;
        }
        return most / 127.0f;
    }
};

}  // namespace

extern const groups::Variant groups_dotprod = {"dotprod", nullptr, groups::round_row<Dotprod>, groups::multiply<Dotprod>};
#endif
