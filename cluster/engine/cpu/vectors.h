/* Vectors of floats in the compiler's own notation, as wide as this processor's registers.
 *
 * What is computed with them has the same bits on every processor: a product and a sum that are rounded together are
 * written as one (`fma_of`), and no others are (-ffp-contract=off); sums of many numbers run over SUM_LANES lanes,
 * whatever the registers hold; exponentials are our own.
 */
#ifndef DRAFTHOUSE_VECTORS_H
#define DRAFTHOUSE_VECTORS_H

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(DRAFTHOUSE_LANES) /* of tests: as wide as another processor's registers */
enum { LANES = DRAFTHOUSE_LANES };
#elif defined(__AVX512F__)
#define HAS_ZMM
enum { LANES = 16 };
#elif defined(__AVX__)
#define HAS_YMM
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
/* Of a sum of many numbers, and the vectors that hold them. */
enum { SUM_LANES = 16, PARTS = SUM_LANES / LANES };

typedef float vfloat __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vint __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

/* Less nothing: plus nothing would turn -0 into 0, which costs an addition. */
INLINE vfloat splat(float value) { return value - vfloat{}; }

/* a * b + c, rounded once. */
INLINE float fma_of(float a, float b, float c) { return std::fma(a, b, c); }
INLINE vfloat fma_of(vfloat a, vfloat b, vfloat c) {
#if defined(HAS_ZMM)
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(HAS_YMM) && defined(__FMA__)
    return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__) && !defined(DRAFTHOUSE_LANES)
    return (vfloat)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
    for (int i = 0; i < LANES; i++) c[i] = fma_of(a[i], b[i], c[i]);
    return c;
}

/* The two bfloat16 in each 32-bit lane, as floats: exact, a bfloat16 is a float's upper half. */
INLINE vfloat lower_half(vuint pairs) { return (vfloat)(pairs << 16); }
INLINE vfloat upper_half(vuint pairs) { return (vfloat)(pairs & 0xffff0000u); }

INLINE vfloat load_bf16(const uint16_t *from) {
#if defined(HAS_ZMM) /* which a conversion of vectors is not made of */
    return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#endif
    return (vfloat)(__builtin_convertvector(*(const vhalf *)from, vuint) << 16);
}

INLINE float bf16_to_float(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

/* Two bfloat16 of each of two vectors multiplied and added to `sums`, as the processor rounds that. */
#if defined(__AVX512BF16__)
enum { MULTIPLIES_BF16 = 1 };
INLINE vfloat add_products(vfloat sums, vuint a, vuint b) {
    return (vfloat)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}
#else
enum { MULTIPLIES_BF16 = 0 };
INLINE vfloat add_products(vfloat sums, vuint a, vuint b) {
    return fma_of(upper_half(a), upper_half(b), fma_of(lower_half(a), lower_half(b), sums));
}
#endif

/* Floats to the nearest bfloat16, ties to even; what is no number stays none. */
INLINE void round_to_bf16(const float *from, uint16_t *to, long size) {
    const auto rounded = [](auto bits) { return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16; };
    const auto is_number = [](auto bits) { return (bits & 0x7fffffffu) <= 0x7f800000u; };
    long i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vuint bits = *(const vuint *)(from + i), quiet = bits >> 16 | 0x40u;
        *(vhalf *)(to + i) = __builtin_convertvector(is_number(bits) ? rounded(bits) : quiet, vhalf);
    }
    for (; i < size; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, 4);
        to[i] = (uint16_t)(is_number(bits) ? rounded(bits) : bits >> 16 | 0x40u);
    }
}

/* function(function(a, b), function(c, d)) ...: halves go with halves, so always in the same order. */
template <typename Function>
INLINE float fold(vfloat value, const Function &function) {
    float lanes[LANES];
    memcpy(lanes, &value, sizeof lanes);
#pragma GCC unroll 4
    for (int width = LANES / 2; width > 0; width /= 2)
#pragma GCC unroll 8
        for (int lane = 0; lane < width; lane++) lanes[lane] = function(lanes[lane], lanes[lane + width]);
    return lanes[0];
}

/* Of all lanes of `parts`, which it changes. */
INLINE float sum_of(vfloat (&parts)[PARTS]) {
#pragma GCC unroll 4
    for (int count = PARTS / 2; count > 0; count /= 2)
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) parts[i] += parts[i + count];
#if defined(HAS_ZMM) && !defined(__clang__) /* which keeps to no order */
    return _mm512_reduce_add_ps((__m512)parts[0]); /* in the same order */
#endif
    return fold(parts[0], [](float a, float b) { return a + b; });
}
INLINE float maximum_of(vfloat value) {
#if defined(HAS_ZMM)
    return _mm512_reduce_max_ps((__m512)value);
#endif
    return fold(value, [](float a, float b) { return a > b ? a : b; });
}

/* Whether a comparison holds in any lane. */
INLINE bool any_of(vint holds) {
#if defined(HAS_ZMM)
    return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds) != 0;
#elif defined(HAS_YMM)
    return _mm256_movemask_ps((__m256)holds) != 0;
#endif
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= holds[i];
    return any != 0;
}

/* e^x to 2 units in the last place, for x between -87 and 88; beyond, what it is at these ends. */
INLINE vfloat exp_of(vfloat x) {
    const vfloat low = splat(-87.0f), high = splat(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const vfloat magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    const vfloat whole = fma_of(x, splat(1.44269504f), magic) - magic;
    vfloat rest = fma_of(whole, splat(-0.693359375f), x);
    rest = fma_of(whole, splat(2.12194440e-4f), rest);
    vfloat sum = splat(1.9875691500e-4f);
    sum = fma_of(sum, rest, splat(1.3981999507e-3f));
    sum = fma_of(sum, rest, splat(8.3334519073e-3f));
    sum = fma_of(sum, rest, splat(4.1665795894e-2f));
    sum = fma_of(sum, rest, splat(1.6666665459e-1f));
    sum = fma_of(sum, rest, splat(5.0000001201e-1f));
    sum = fma_of(sum * rest, rest, rest) + splat(1.0f);
    const vint power = __builtin_convertvector(whole, vint);
    return sum * (vfloat)((power + 127) << 23);
}

INLINE float exp_of(float x) { return exp_of(splat(x))[0]; }

#endif
