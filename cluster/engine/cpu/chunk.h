/* A chunk of keys and values laid out for products, and the products: of attention.cpp. */
#ifndef DRAFTHOUSE_CHUNK_H
#define DRAFTHOUSE_CHUNK_H

#include <type_traits>

#include "vectors.h"

/* Keys in a chunk; bytes of a cache line. */
enum { CHUNK = 64, LINE = 64 };

namespace {

/* Floats; bfloat16, as floats; bfloat16 that the processor multiplies itself, two at a time, by queries
 * and weights rounded to it. */
enum Cache { FLOATS, BF16S, BF16_PAIRS };
template <Cache cache>
constexpr long SIZE = cache == FLOATS ? 4 : 2;
/* What a 32-bit lane holds of a product's inputs, and how many of them. */
template <Cache cache>
using Item = std::conditional_t<cache == BF16_PAIRS, uint32_t, float>;
template <Cache cache>
constexpr long PER_ITEM = cache == BF16_PAIRS ? 2 : 1;

/* LANES items of a key, from item `number` on. */
template <Cache cache>
INLINE vuint load_items(const void *key, long number) {
    if constexpr (cache == BF16S) return (vuint)load_bf16(static_cast<const uint16_t *>(key) + number);
    else return *(const vuint *)(static_cast<const uint32_t *>(key) + number);
}

/* to[i][k] = item `number` + i of key k: LANES keys side by side.  Not inlined, so that it stays in registers. */
template <Cache cache>
__attribute__((noinline)) void put_side_by_side(const void *const *from, long number, Item<cache> *to) {
    vuint rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = load_items<cache>(from[i], number);
#pragma GCC unroll 4
    for (int distance = LANES / 2; distance > 0; distance /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & distance) continue;
            const vuint a = rows[i], b = rows[i + distance];
#if defined(__clang__)
            for (int lane = 0; lane < LANES; lane++) {
                rows[i][lane] = lane & distance ? b[lane - distance] : a[lane];
                rows[i + distance][lane] = lane & distance ? b[lane] : a[lane + distance];
            }
#else
            vint lanes = {};
            for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane & distance ? LANES + lane - distance : lane;
            rows[i] = __builtin_shuffle(a, b, lanes);
            rows[i + distance] = __builtin_shuffle(a, b, lanes + distance);
#endif
        }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) *(vuint *)(to + i * CHUNK) = rows[i];
}

/* The bfloat16 of a and b by turns: those of the lower halves, or of the upper ones. */
template <bool upper>
INLINE vuint interleave(vuint a, vuint b) {
    typedef uint16_t vshort __attribute__((vector_size(LANES * 4), may_alias));
    vshort result = {};
#if defined(__clang__)
    for (int i = 0; i < 2 * LANES; i++) result[i] = (i % 2 ? (vshort)b : (vshort)a)[(upper ? LANES : 0) + i / 2];
#else
    for (int i = 0; i < 2 * LANES; i++) result[i] = i % 2 * 2 * LANES + (upper ? LANES : 0) + i / 2;
    result = __builtin_shuffle((vshort)a, (vshort)b, result);
#endif
    return (vuint)result;
}

/* A chunk as the products take it: keys [head_dim][CHUNK], values [CHUNK][head_dim], neighbours in the
 * first dimension in one item.  at: the key in each column; null where there is none, and its value is 0. */
template <Cache cache>
struct Packed {
    Item<cache> *keys, *values;
    long head_dim, value_offset;
    const void *at[CHUNK];

    /* The values of the keys in columns j and, if an item holds two, j + 1. */
    INLINE_MEMBER void put_values(int j, const void *first, const void *second) {
        Item<cache> *to = values + j / PER_ITEM<cache> * head_dim;
        if constexpr (cache == BF16_PAIRS) {
            const auto *a = static_cast<const uint16_t *>(first) + value_offset;
            const auto *b = static_cast<const uint16_t *>(second) + value_offset;
            for (long d = 0; d < head_dim; d += 2 * LANES) {
                const vuint x = *(const vuint *)(a + d), y = second ? *(const vuint *)(b + d) : vuint{};
                *(vuint *)(to + d) = interleave<false>(x, y);
                *(vuint *)(to + d + LANES) = interleave<true>(x, y);
            }
        } else {
            for (long d = 0; d < head_dim; d += LANES) *(vuint *)(to + d) = load_items<cache>(first, value_offset + d);
        }
    }

    /* Columns 0 to `count` hold these keys; the others are empty.  `next`, as many as `num_next`, are asked for. */
    void fill(const void *const *from, int count, const void *const *next, int num_next) {
        for (int first = 0; first < count; first += LANES) {
            const void *own[LANES];
            for (int i = 0; i < LANES; i++) own[i] = from[first + i < count ? first + i : count - 1];
            for (long d = 0; d < head_dim / PER_ITEM<cache>; d += LANES)
                put_side_by_side<cache>(own, d, keys + d * CHUNK + first);
            for (int i = first; i < first + LANES && i < num_next; i++) fetch(next[i]);
        }
        for (int j = 0; j < CHUNK; j++) at[j] = j < count ? from[j] : nullptr;
        int j = 0;
        for (; j < count; j += PER_ITEM<cache>) {
            put_values(j, from[j], j + 1 < count ? from[j + 1] : nullptr);
            for (int i = j; i < j + PER_ITEM<cache> && i < num_next; i++)
                fetch(static_cast<const char *>(next[i]) + value_offset * SIZE<cache>);
        }
        memset(values + j / PER_ITEM<cache> * head_dim, 0, (CHUNK - j) / PER_ITEM<cache> * head_dim * 4);
    }

    /* A head's key or value. */
    INLINE_MEMBER void fetch(const void *from) {
        for (long i = 0; i < head_dim * SIZE<cache>; i += LINE) __builtin_prefetch(static_cast<const char *>(from) + i, 0, 2);
    }

    /* Column j holds this key, and the others what they did. */
    void put(int j, const void *key) {
        if (at[j] == key) return;
        at[j] = key;
        for (long d = 0; d < head_dim / PER_ITEM<cache>; d += LANES) {
            const vuint items = load_items<cache>(key, d);
            for (int i = 0; i < LANES; i++) memcpy(keys + (d + i) * CHUNK + j, (const char *)&items + 4 * i, 4);
        }
        const int first = j / PER_ITEM<cache> * PER_ITEM<cache>;
        put_values(first, at[first], PER_ITEM<cache> > 1 ? at[first + 1] : nullptr);
    }
};

template <Cache cache, int num_rows, int num_vectors>
INLINE void multiply_block(const Item<cache> *rows, long row_size, long depth, const Item<cache> *matrix, long width,
                           float *sums) {
    vfloat each[num_rows][num_vectors];
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) each[r][v] = vfloat{};
    for (long k = 0; k < depth; k++, matrix += width) {
        vuint columns[num_vectors];
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) columns[v] = *(const vuint *)(matrix + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < num_vectors; v++)
                if constexpr (cache == BF16_PAIRS)
                    each[r][v] = add_products(each[r][v], rows[r * row_size + k] - vuint{}, columns[v]);
                else
                    each[r][v] = fma_of(splat(rows[r * row_size + k]), (vfloat)columns[v], each[r][v]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++) *(vfloat *)(sums + r * width + v * LANES) = each[r][v];
}

template <Cache cache, int num_vectors>
INLINE void multiply_columns(const Item<cache> *rows, int count, long row_size, long depth, const Item<cache> *matrix,
                             long width, float *sums) {
    for (int r = 0; r < count; r += 4, rows += 4 * row_size, sums += 4 * width) {
        if (count - r == 1) multiply_block<cache, 1, num_vectors>(rows, row_size, depth, matrix, width, sums);
        else if (count - r == 2) multiply_block<cache, 2, num_vectors>(rows, row_size, depth, matrix, width, sums);
        else if (count - r == 3) multiply_block<cache, 3, num_vectors>(rows, row_size, depth, matrix, width, sums);
        else multiply_block<cache, 4, num_vectors>(rows, row_size, depth, matrix, width, sums);
    }
}

/* sums[count][width] = rows[count][row_size] matrix[row_size][width], of which the first `depth` items
 * and `columns` columns count; each in ascending order of depth. */
template <Cache cache>
void multiply_rows(const Item<cache> *rows, int count, long row_size, long depth, const Item<cache> *matrix, long width,
                   long columns, float *sums) {
    constexpr int WIDE = LANES == 16 ? 4 : 2; /* as registers hold with 4 rows */
    long n = 0;
    for (; n + WIDE * LANES <= columns; n += WIDE * LANES)
        multiply_columns<cache, WIDE>(rows, count, row_size, depth, matrix + n, width, sums + n);
    for (; n < columns; n += LANES)
        multiply_columns<cache, 1>(rows, count, row_size, depth, matrix + n, width, sums + n);
}

}  // namespace

#endif
