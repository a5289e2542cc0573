/* Products of groups by the dot products of ARM beside those in plain C, for a machine that is emulated: prints the cases
 * that differ in a bit, and returns how many there are. */
#include <cstdio>
#include <random>
#include <vector>

#include "groups.h"

extern const groups::Variant groups_c, groups_dotprod;

namespace {

using namespace groups;

std::mt19937 generator(1);

struct Case {
    int bits, halves;
    bool has_minimum;
    long inputs, outputs, rows;
    long units() const { return (inputs + UNIT - 1) / UNIT; }
    long blocks() const { return (outputs + OUTPUTS - 1) / OUTPUTS; }
};

/* Random bytes, of which those of scales are finite. */
std::vector<uint8_t> weights_of(const Case &each) {
    const long bytes = unit_bytes(each.bits, each.halves, each.has_minimum);
    std::vector<uint8_t> weights(each.blocks() * each.units() * bytes);
    for (uint8_t &byte : weights) byte = (uint8_t)generator();
    for (long unit = 0; unit < each.blocks() * each.units(); unit++)
        for (int i = 0; i < each.halves * (each.has_minimum ? 2 : 1) * OUTPUTS; i++) {
            const uint16_t half = (uint16_t)((generator() & 0x83ff) | generator() % 24 << 10);
            memcpy(&weights[unit * bytes + 2 * i], &half, 2);
        }
    return weights;
}

std::vector<float> product(const Variant &variant, const Case &each, const std::vector<uint8_t> &weights,
                           const std::vector<float> &rows, const std::vector<float> &bias) {
    std::vector<RowUnit> units(each.rows * each.units());
    std::vector<float> output(each.rows * each.outputs);
    const Call call = {rows.data(), units.data(), weights.data(), bias.data(), output.data(), each.rows, each.inputs,
                       each.outputs, each.units(), each.bits, each.halves, each.has_minimum};
    for (long row = 0; row < each.rows; row++) variant.round_row(call, row);
    for (long chunk = 0; chunk * CHUNK_ROWS < each.rows; chunk++)
        for (long block = 0; block < each.blocks(); block++) variant.multiply(call, chunk, block);
    return output;
}

bool is_equal(const Case &each) {
    std::vector<float> rows(each.rows * each.inputs), bias(each.outputs);
    for (float &value : rows) value = ((int)(generator() % 20001) - 10000) * std::ldexp(1.0f, (int)(generator() % 9) - 6);
    for (float &value : bias) value = (float)(generator() % 7);
    for (long i = 0; i < each.inputs && each.rows > 3; i++) rows[i] = 0.0f, rows[each.inputs + i] = i % 255 - 126.5f;
    const std::vector<uint8_t> weights = weights_of(each);
    const auto expected = product(groups_c, each, weights, rows, bias);
    return memcmp(expected.data(), product(groups_dotprod, each, weights, rows, bias).data(), expected.size() * 4) == 0;
}

}  // namespace

int main() {
    int num_different = 0, num_cases = 0;
    for (int bits : {4, 8})
        for (int halves : {1, 2})
            for (bool has_minimum : {false, true})
                for (long inputs : {16, 64, 144, 576})
                    for (long outputs : {5, 40})
                        for (long rows : {1, 2, 3, 7, 16, 64, 65, 70}) {
                            const Case each = {bits, halves, has_minimum, inputs, outputs, rows};
                            num_cases++;
                            if (is_equal(each)) continue;
                            num_different++;
                            printf("%d bits, %d halves, minimum %d, %ld by %ld, %ld rows\n", bits, halves, has_minimum,
                                   inputs, outputs, rows);
                        }
    printf("%d cases, %d differ\n", num_cases, num_different);
    return num_different;
}
