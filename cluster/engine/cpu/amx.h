/* The processor's tiles (AMX): 16 rows of 64 bytes each, of which one instruction multiplies two. */
#ifndef DRAFTHOUSE_AMX_H
#define DRAFTHOUSE_AMX_H

#include "vectors.h"

/* Of bfloat16; a tile has as many columns of 32 bits as a vector has lanes. */
enum { TILE_ROWS = 16, TILE_INPUTS = 32 };

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights. */
enum { NUM_SUMS = 4 };

/* Linux lets a process use tiles once it has asked for their state (arch_prctl's manual). */
static bool ask_for_tiles() {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
static const bool has_tiles = ask_for_tiles();

static void shape_tiles(const int (&sum_rows)[NUM_SUMS], int first_rows, int second_rows) {
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t num_rows[16];
    } shape = {};
    shape.palette = 1;
    const int num_rows[] = {sum_rows[0], sum_rows[1], sum_rows[2], sum_rows[3],
                            first_rows,  second_rows, TILE_ROWS,   TILE_ROWS};
    for (int tile = 0; tile < 8; tile++) {
        shape.row_bytes[tile] = num_rows[tile] ? 64 : 0;
        shape.num_rows[tile] = (uint8_t)num_rows[tile];
    }
    __asm__ volatile("" ::"r"(&shape) : "memory"); /* GCC takes the next line to read its first 8 bytes alone */
    _tile_loadconfig(&shape);
}

/* All of full size, for `multiply_in_tiles`. */
INLINE void shape_tiles() {
    shape_tiles({TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS}, TILE_ROWS, TILE_ROWS);
}

INLINE void release_tiles() { _tile_release(); }

template <int num_tiles>
INLINE void multiply_tiles(const uint32_t *rows, long depth, const uint32_t *matrix, long width, float *sums) {
    _tile_zero(0);
    if constexpr (num_tiles == 4) {
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < depth; k += TILE_INPUTS / 2, matrix += TILE_INPUTS / 2 * width) {
        _tile_loadd(4, rows + k, depth * 4);
        _tile_loadd(6, matrix, width * 4);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (num_tiles == 4) {
            _tile_loadd(7, matrix + LANES, width * 4);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, matrix + 2 * LANES, width * 4);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, matrix + 3 * LANES, width * 4);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, width * 4);
    if constexpr (num_tiles == 4) {
        _tile_stored(1, sums + LANES, width * 4);
        _tile_stored(2, sums + 2 * LANES, width * 4);
        _tile_stored(3, sums + 3 * LANES, width * 4);
    }
}

/* sums[TILE_ROWS][width] = rows[TILE_ROWS][depth] matrix[depth][width]; pairs of bfloat16, depth a multiple
 * of TILE_INPUTS / 2, width one of LANES.  Each sum runs in ascending order of depth. */
INLINE void multiply_in_tiles(const uint32_t *rows, long depth, const uint32_t *matrix, long width, float *sums) {
    __asm__ volatile("" ::: "memory"); /* GCC does not know that the next lines read memory */
    long n = 0;
    for (; n + 4 * LANES <= width; n += 4 * LANES) multiply_tiles<4>(rows, depth, matrix + n, width, sums + n);
    for (; n < width; n += LANES) multiply_tiles<1>(rows, depth, matrix + n, width, sums + n);
}

#else
constexpr bool has_tiles = false;
INLINE void shape_tiles() {}
INLINE void release_tiles() {}
INLINE void multiply_in_tiles(const uint32_t *, long, const uint32_t *, long, float *) {}
#endif

#endif
