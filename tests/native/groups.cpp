/* Products of groups beside those in plain C, for a machine that is emulated: prints the cases that differ in a bit, and
 * returns how many there are.  Arguments: the instructions, and our libraries, all of which must load. */
#include <dlfcn.h>

#include <cstdio>
#include <random>
#include <vector>

#include "groups.h"
#include "operations.h"

namespace {

using namespace groups;

int (*choose)(const char *name);
void (*multiply)(const float *rows, float *scratch, const void *weight, const float *bias, float *output, long num_rows,
                 long num_inputs, long num_outputs, int format, int num_threads);

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
    const Header header = {each.bits, each.halves, each.has_minimum};
    std::vector<uint8_t> weights(HEADER_BYTES + each.blocks() * each.units() * bytes);
    for (uint8_t &byte : weights) byte = (uint8_t)generator();
    memcpy(weights.data(), &header, sizeof header);
    for (long unit = 0; unit < each.blocks() * each.units(); unit++)
        for (int i = 0; i < each.halves * (each.has_minimum ? 2 : 1) * OUTPUTS; i++) {
            const uint16_t half = (uint16_t)((generator() & 0x83ff) | generator() % 24 << 10);
            memcpy(&weights[HEADER_BYTES + unit * bytes + 2 * i], &half, 2);
        }
    return weights;
}

std::vector<float> product(const char *name, const Case &each, const std::vector<uint8_t> &weights,
                           const std::vector<float> &rows, const std::vector<float> &bias) {
    std::vector<float> scratch(each.rows * each.units() * sizeof(RowUnit) / sizeof(float)), output(each.rows * each.outputs);
    if (!choose(name)) fprintf(stderr, "no %s\n", name), exit(1);
    multiply(rows.data(), scratch.data(), weights.data(), bias.data(), output.data(), each.rows, each.inputs, each.outputs,
             GROUPS, 2);
    return output;
}

bool is_equal(const char *name, const Case &each) {
    std::vector<float> rows(each.rows * each.inputs), bias(each.outputs);
    for (float &value : rows) value = ((int)(generator() % 20001) - 10000) * std::ldexp(1.0f, (int)(generator() % 9) - 6);
    for (float &value : bias) value = (float)(generator() % 7);
    for (long i = 0; i < each.inputs && each.rows > 3; i++) rows[i] = 0.0f, rows[each.inputs + i] = i % 255 - 126.5f;
    const std::vector<uint8_t> weights = weights_of(each);
    const auto expected = product("c", each, weights, rows, bias);
    return memcmp(expected.data(), product(name, each, weights, rows, bias).data(), expected.size() * 4) == 0;
}

}  // namespace

int main(int count, char **arguments) {
    for (int i = 2; i < count; i++) {
        void *library = dlopen(arguments[i], RTLD_NOW);
        if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
        if (!dlsym(library, "choose_products")) continue;
        choose = (decltype(choose))dlsym(library, "choose_products");
        multiply = (decltype(multiply))dlsym(library, "linear");
    }
    int num_different = 0, num_cases = 0;
    for (int bits : {4, 8})
        for (int halves : {1, 2})
            for (bool has_minimum : {false, true})
                for (long inputs : {16, 64, 144, 576})
                    for (long outputs : {5, 40})
                        for (long rows : {1, 2, 3, 7, 16, 64, 65, 70}) {
                            const Case each = {bits, halves, has_minimum, inputs, outputs, rows};
                            num_cases++;
                            if (is_equal(arguments[1], each)) continue;
                            num_different++;
                            printf("%d bits, %d halves, minimum %d, %ld by %ld, %ld rows\n", bits, halves, has_minimum,
                                   inputs, outputs, rows);
                        }
    printf("%d cases, %d differ\n", num_cases, num_different);
    return num_different;
}
