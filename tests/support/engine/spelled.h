/* Instructions that a machine may lack, as loops over what their manuals say: AVX-512, its VNNI and AVX-VNNI, and AMX.
 * Included behind immintrin.h, whose names they take. */
#ifndef SPELLED_H
#define SPELLED_H

#include <cmath>
#include <cstdint>
#include <cstring>

namespace spelled {

struct Floats {
    float lanes[16];
};
struct Ints {
    int32_t lanes[16];
};

template <typename Result, typename Function>
Result each(const Function &function) {
    Result result;
    for (int i = 0; i < 16; i++) result.lanes[i] = function(i);
    return result;
}

/* Of unsigned bytes by signed ones, four side by side, added to a sum. */
inline int32_t dpbusd(int32_t sum, uint32_t a, uint32_t b) {
    for (int k = 0; k < 32; k += 8) sum += static_cast<uint8_t>(a >> k) * static_cast<int8_t>(b >> k);
    return sum;
}

inline Floats set1_ps(float value) {
    return each<Floats>([&](int) { return value; });
}
inline Floats loadu_ps(const float *from) {
    return each<Floats>([&](int i) { return from[i]; });
}
inline void storeu_ps(float *to, const Floats &value) { memcpy(to, value.lanes, sizeof value.lanes); }
inline Floats mul_ps(const Floats &a, const Floats &b) {
    return each<Floats>([&](int i) { return a.lanes[i] * b.lanes[i]; });
}
inline Floats fmadd_ps(const Floats &a, const Floats &b, const Floats &c) {
    return each<Floats>([&](int i) { return std::fma(a.lanes[i], b.lanes[i], c.lanes[i]); });
}
inline Floats cvtph_ps(__m256i halves) {
    uint16_t from[16];
    memcpy(from, &halves, sizeof from);
    return each<Floats>([&](int i) { return _cvtsh_ss(from[i]); });
}
inline Floats cvtepi32_ps(const Ints &value) {
    return each<Floats>([&](int i) { return static_cast<float>(value.lanes[i]); });
}
inline Ints set1_epi32(int32_t value) {
    return each<Ints>([&](int) { return value; });
}
inline Ints loadu_si512(const void *from) {
    Ints result;
    memcpy(result.lanes, from, sizeof result.lanes);
    return result;
}
inline Ints and_si512(const Ints &a, const Ints &b) {
    return each<Ints>([&](int i) { return a.lanes[i] & b.lanes[i]; });
}
inline Ints xor_si512(const Ints &a, const Ints &b) {
    return each<Ints>([&](int i) { return a.lanes[i] ^ b.lanes[i]; });
}
inline Ints srli_epi32(const Ints &a, int count) {
    return each<Ints>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.lanes[i]) >> count); });
}
inline Ints dpbusd_epi32(const Ints &sums, const Ints &a, const Ints &b) {
    return each<Ints>([&](int i) { return dpbusd(sums.lanes[i], a.lanes[i], b.lanes[i]); });
}

inline __m256i dpbusd_avx_epi32(__m256i sums, __m256i a, __m256i b) {
    int32_t sum[8], first[8], second[8];
    memcpy(sum, &sums, sizeof sum);
    memcpy(first, &a, sizeof first);
    memcpy(second, &b, sizeof second);
    for (int i = 0; i < 8; i++) sum[i] = dpbusd(sum[i], first[i], second[i]);
    memcpy(&sums, sum, sizeof sum);
    return sums;
}

/* Tiles: of palette 1, eight of 16 rows of 64 bytes; rows and bytes beyond a tile's shape are never touched. */
struct Tiles {
    uint8_t num_rows[8], bytes[8][16][64];
    uint16_t row_bytes[8];
};
inline Tiles &tiles() {
    static thread_local Tiles each;
    return each;
}

inline void tile_loadconfig(const void *shape) {
    const uint8_t *from = static_cast<const uint8_t *>(shape);
    if (from[0] != 1) __builtin_trap();
    tiles() = {};
    memcpy(tiles().row_bytes, from + 16, sizeof tiles().row_bytes);
    memcpy(tiles().num_rows, from + 48, sizeof tiles().num_rows);
}
inline void tile_zero(int tile) { memset(tiles().bytes[tile], 0, sizeof tiles().bytes[tile]); }
inline void tile_loadd(int tile, const void *from, long stride) {
    tile_zero(tile);
    for (int row = 0; row < tiles().num_rows[tile]; row++)
        memcpy(tiles().bytes[tile][row], static_cast<const uint8_t *>(from) + row * stride, tiles().row_bytes[tile]);
}
inline void tile_stored(int tile, void *to, long stride) {
    for (int row = 0; row < tiles().num_rows[tile]; row++)
        memcpy(static_cast<uint8_t *>(to) + row * stride, tiles().bytes[tile][row], tiles().row_bytes[tile]);
}
inline void tile_dpbssd(int sums, int a, int b) {
    Tiles &all = tiles();
    if (all.num_rows[sums] != all.num_rows[a] || all.row_bytes[sums] != all.row_bytes[b] ||
        all.row_bytes[a] != 4 * all.num_rows[b])
        __builtin_trap(); /* as the processor does */
    for (int row = 0; row < all.num_rows[sums]; row++)
        for (int column = 0; column < all.row_bytes[sums] / 4; column++) {
            int32_t sum;
            memcpy(&sum, all.bytes[sums][row] + 4 * column, 4);
            for (int k = 0; k < all.row_bytes[a]; k++)
                sum += static_cast<int8_t>(all.bytes[a][row][k]) *
                       static_cast<int8_t>(all.bytes[b][k / 4][4 * column + k % 4]);
            memcpy(all.bytes[sums][row] + 4 * column, &sum, 4);
        }
}

}  // namespace spelled

#define __m512 spelled::Floats
#define __m512i spelled::Ints
#define _mm512_set1_ps spelled::set1_ps
#define _mm512_loadu_ps spelled::loadu_ps
#define _mm512_storeu_ps spelled::storeu_ps
#define _mm512_mul_ps spelled::mul_ps
#define _mm512_fmadd_ps spelled::fmadd_ps
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps spelled::cvtph_ps
#define _mm512_cvtepi32_ps spelled::cvtepi32_ps
#define _mm512_set1_epi32 spelled::set1_epi32

#define _mm512_loadu_si512 spelled::loadu_si512
#define _mm512_and_si512 spelled::and_si512
#define _mm512_xor_si512 spelled::xor_si512
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 spelled::srli_epi32
#define _mm512_dpbusd_epi32 spelled::dpbusd_epi32
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 spelled::dpbusd_avx_epi32
#undef _tile_loadconfig
#define _tile_loadconfig spelled::tile_loadconfig
#undef _tile_zero
#define _tile_zero spelled::tile_zero
#undef _tile_loadd
#define _tile_loadd spelled::tile_loadd
#undef _tile_stored
#define _tile_stored spelled::tile_stored
#undef _tile_dpbssd
#define _tile_dpbssd spelled::tile_dpbssd
#undef _tile_release
#define _tile_release() ((void)0)

#endif
