/* Which instructions multiply groups, and the products. */
#include "groups.h"

#include "operations.h"
#include "pool.h"

extern const groups::Variant groups_amx_int8, groups_avx512_vnni, groups_avx_vnni, groups_avx2, groups_dotprod;
extern const groups::Variant groups_c;

namespace {

using namespace groups;

const Variant *const VARIANTS[] = {
#if defined(HAS_AMX_INT8)
    &groups_amx_int8,
#endif
#if defined(HAS_AVX512_VNNI)
    &groups_avx512_vnni,
#endif
#if defined(HAS_AVX_VNNI)
    &groups_avx_vnni,
#endif
#if defined(HAS_AVX2)
    &groups_avx2,
#endif
#if defined(HAS_DOTPROD)
    &groups_dotprod,
#endif
    &groups_c,
};

const Variant *chosen = &groups_c;

/* Rows that one thread rounds at a time: less is not worth waking it. */
enum { ROUNDED_ROWS = 4 };

void round_rows(void *argument, long part) {
    const Call &call = *static_cast<const Call *>(argument);
    for (long row = part * ROUNDED_ROWS; row < call.num_rows && row < (part + 1) * ROUNDED_ROWS; row++)
        chosen->round_row(call, row);
}

long num_blocks(const Call &call) { return (call.num_outputs + OUTPUTS - 1) / OUTPUTS; }

/* The chunks one after the other, each by all blocks. */
void multiply_part(void *argument, long part) {
    const Call &call = *static_cast<const Call *>(argument);
    chosen->multiply(call, part / num_blocks(call), part % num_blocks(call));
}

}  // namespace

/* Multiply groups with the instructions of that name, which the caller knows this processor to have; returns 0 where
 * this library has none of the name, or the system does not allow them. */
extern "C" int choose_products(const char *name) {
    for (const Variant *variant : VARIANTS) {
        if (strcmp(variant->name, name) || (variant->is_allowed && !variant->is_allowed())) continue;
        chosen = variant;
        return 1;
    }
    return 0;
}

void multiply_groups(const float *rows, void *scratch, const void *weight, const float *bias, float *output, long num_rows,
                     long num_inputs, long num_outputs, int num_threads) {
    const Header &header = *static_cast<const Header *>(weight);
    Call call = {rows, static_cast<RowUnit *>(scratch), static_cast<const uint8_t *>(weight) + HEADER_BYTES, bias, output,
                 num_rows, num_inputs, num_outputs, (num_inputs + UNIT - 1) / UNIT, header.bits, header.halves,
                 header.has_minimum != 0};
    run_blocks(round_rows, &call, (num_rows + ROUNDED_ROWS - 1) / ROUNDED_ROWS, num_threads);
    run_blocks(multiply_part, &call, num_blocks(call) * ((num_rows + CHUNK_ROWS - 1) / CHUNK_ROWS), num_threads,
               NEIGHBOURS);
}
