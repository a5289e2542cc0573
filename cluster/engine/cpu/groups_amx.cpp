/* Products of groups in the processor's tiles (AMX-INT8): a unit of up to 16 rows by 16 outputs in one instruction. */
#include "groups.h"

#if defined(HAS_AMX_INT8)
#if defined(DRAFTHOUSE_SPELLED)
#pragma GCC target("avx2,fma,f16c")
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,amx-tile,amx-int8")
#endif
#include "groups_kernel.h"
#include "groups_zmm.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace {

using namespace groups;

/* Rows of a tile; with fewer than the least in a chunk, vectors are as fast. */
enum { TILE_ROWS = 16, LEAST_ROWS = 8 };
/* Tiles 0, 1 and 2 are sums, rows and weights for TILE_ROWS rows, 3 and 4 sums and rows for the last ones of a chunk. */
enum { NUM_TILES = 5 };

/* Linux lets a process use tiles once it has asked for their state (arch_prctl's manual). */
bool may_use_tiles() {
#if defined(DRAFTHOUSE_SPELLED)
    return true;
#else
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#endif
}

/* steps: of the weights that are multiplied at once. */
void shape_tiles(int steps, int last_rows) {
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t num_rows[16];
    } shape = {};
    const int rows[] = {TILE_ROWS, TILE_ROWS, steps, last_rows, last_rows};
    const int bytes[] = {OUTPUTS * 4, steps * 4, OUTPUTS * 4, OUTPUTS * 4, steps * 4};
    shape.palette = 1;
    for (int tile = 0; tile < NUM_TILES; tile++) {
        shape.num_rows[tile] = static_cast<uint8_t>(rows[tile]);
        shape.row_bytes[tile] = static_cast<uint16_t>(rows[tile] ? bytes[tile] : 0);
    }
    __asm__ volatile("" ::"r"(&shape) : "memory"); /* GCC takes the next line to read its first 8 bytes alone */
    _tile_loadconfig(&shape);
}

/* sums[rows][OUTPUTS] of a half of the units, or of whole ones, which begins at their integer `first`. */
void multiply_tile(bool is_last, const RowUnit *units, int first, const uint8_t *weights, int32_t *sums) {
    __asm__ volatile("" ::: "memory"); /* GCC does not know that these lines read memory and write it */
    _tile_loadd(2, weights, OUTPUTS * 4);
    if (is_last) {
        _tile_zero(3);
        _tile_loadd(4, units->integers + first, sizeof(RowUnit));
        _tile_dpbssd(3, 4, 2);
        _tile_stored(3, sums, OUTPUTS * 4);
    } else {
        _tile_zero(0);
        _tile_loadd(1, units->integers + first, sizeof(RowUnit));
        _tile_dpbssd(0, 1, 2);
        _tile_stored(0, sums, OUTPUTS * 4);
    }
    __asm__ volatile("" ::: "memory");
}

/* A unit's integers, [8][OUTPUTS][4], as bytes. */
const uint8_t *widened(const uint8_t *integers, int bits, uint8_t *to) {
    if (bits == 8) return integers;
    for (int i = 0; i < UNIT * OUTPUTS / 2; i++) {
        to[i] = integers[i] & 15;
        to[UNIT * OUTPUTS / 2 + i] = integers[i] >> 4;
    }
    return to;
}

void multiply_in_tiles(const Call &call, long chunk, long block) {
    const long first = chunk * CHUNK_ROWS;
    long count;
    const RowUnit *units = units_of(call, first, &count);
    if (count < LEAST_ROWS) return multiply<Zmm>(call, chunk, block);
    const long bytes = unit_bytes(call.bits, call.halves, call.has_minimum);
    const int steps = STEPS / call.halves;
    shape_tiles(steps, static_cast<int>(count % TILE_ROWS));
    alignas(64) float sums[CHUNK_ROWS][OUTPUTS];
    alignas(64) int32_t products[TILE_ROWS][OUTPUTS];
    alignas(64) uint8_t buffer[UNIT * OUTPUTS];
    memset(sums, 0, count * sizeof sums[0]);
    const uint8_t *from = call.blocks + block * call.num_units * bytes;
    for (long u = 0; u < call.num_units; u++, from += bytes, units += count) {
        const uint16_t *scales = reinterpret_cast<const uint16_t *>(from), *minimums = scales + call.halves * OUTPUTS;
        const uint8_t *integers = from + call.halves * (call.has_minimum ? 2 : 1) * OUTPUTS * 2;
        integers = widened(integers, call.bits, buffer);
        for (int h = 0; h < call.halves; h++) {
            const Zmm::Floats scale = Zmm::halves_of(scales + h * OUTPUTS);
            const Zmm::Floats minimum = call.has_minimum ? Zmm::halves_of(minimums + h * OUTPUTS) : Zmm::splat(0.0f);
            for (long row = 0; row < count; row += TILE_ROWS) {
                const bool is_last = row + TILE_ROWS > count;
                multiply_tile(is_last, units + row, h * steps * 4, integers + h * steps * OUTPUTS * 4, products[0]);
                for (long r = row; r < row + TILE_ROWS && r < count; r++) {
                    Zmm::Floats sum = Zmm::load(sums[r]);
                    const Zmm::Floats product = _mm512_cvtepi32_ps(_mm512_loadu_si512(products[r - row]));
                    sum = Zmm::fma(Zmm::times(scale, Zmm::splat(units[r].scale)), product, sum);
                    if (call.has_minimum) sum = Zmm::fma(minimum, Zmm::splat(units[r].sums[h]), sum);
                    Zmm::store(sums[r], sum);
                }
            }
        }
    }
    _tile_release();
    store_outputs(call, first, count, block, sums);
}

}  // namespace

extern const groups::Variant groups_amx_int8 = {"amx-int8", may_use_tiles, groups::round_row<Zmm>, multiply_in_tiles};
#endif
