/* Vectors of floats in the compiler's own notation, as wide as this processor's registers. */
#ifndef DRAFTHOUSE_VECTORS_H
#define DRAFTHOUSE_VECTORS_H

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float vfloat __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vint __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

/* Less nothing: plus nothing would turn -0 into 0, which costs an addition. */
INLINE vfloat splat(float value) { return value - vfloat{}; }

/* The two bfloat16 in each 32-bit lane, as floats: exact, a bfloat16 is a float's upper half. */
INLINE vfloat lower_half(vuint pairs) { return (vfloat)(pairs << 16); }
INLINE vfloat upper_half(vuint pairs) { return (vfloat)(pairs & 0xffff0000u); }

INLINE vfloat load_bf16(const uint16_t *from) {
#if defined(__AVX512F__) /* which a conversion of vectors is not made of */
    return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#endif
    return (vfloat)(__builtin_convertvector(*(const vhalf *)from, vuint) << 16);
}

/* To the nearest, ties to even; what is no number stays none. */
INLINE uint16_t float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
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
/* 2 * LANES floats to the nearest bfloat16, in their order. */
INLINE vuint rounded_pairs(const float *from) {
    return (vuint)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + LANES), _mm512_loadu_ps(from));
}
#else
enum { MULTIPLIES_BF16 = 0 };
INLINE vfloat add_products(vfloat sums, vuint a, vuint b) {
    sums += lower_half(a) * lower_half(b);
    return sums + upper_half(a) * upper_half(b);
}
INLINE vuint rounded_pairs(const float *from) {
    vuint pairs = {};
    for (int i = 0; i < LANES; i++) pairs[i] = float_to_bf16(from[2 * i]) | (uint32_t)float_to_bf16(from[2 * i + 1]) << 16;
    return pairs;
}
#endif

INLINE void round_to_bf16(const float *from, uint16_t *to, long size) {
    long i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) *(vuint *)(to + i) = rounded_pairs(from + i);
    for (; i < size; i++) to[i] = float_to_bf16(from[i]);
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

#if defined(__AVX512F__) /* in the same order */
INLINE float sum_of(vfloat value) { return _mm512_reduce_add_ps((__m512)value); }
INLINE float maximum_of(vfloat value) { return _mm512_reduce_max_ps((__m512)value); }
#else
INLINE float sum_of(vfloat value) {
    return fold(value, [](float a, float b) { return a + b; });
}
INLINE float maximum_of(vfloat value) {
    return fold(value, [](float a, float b) { return a > b ? a : b; });
}
#endif

/* Whether a comparison holds in any lane. */
INLINE bool any_of(vint holds) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds) != 0;
#elif defined(__AVX__)
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
    const vfloat whole = (x * splat(1.44269504f) + magic) - magic;
    vfloat rest = x - whole * splat(0.693359375f);
    rest = rest + whole * splat(2.12194440e-4f);
    vfloat sum = splat(1.9875691500e-4f);
    sum = sum * rest + splat(1.3981999507e-3f);
    sum = sum * rest + splat(8.3334519073e-3f);
    sum = sum * rest + splat(4.1665795894e-2f);
    sum = sum * rest + splat(1.6666665459e-1f);
    sum = sum * rest + splat(5.0000001201e-1f);
    sum = sum * rest * rest + rest + splat(1.0f);
    const vint power = __builtin_convertvector(whole, vint);
    return sum * (vfloat)((power + 127) << 23);
}

INLINE float exp_of(float x) { return exp_of(splat(x))[0]; }

#endif
