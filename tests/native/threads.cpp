/* The thread pool under several callers, for a build with ThreadSanitizer: see `make check-native`.
 *
 * Each caller multiplies with weights of its own and attends to keys of its own, at the same time as
 * the others, and must get what it got alone, to the bit.
 */
#include <cstdio>
#include <thread>
#include <vector>

#include "../../cluster/engine/cpu/operations.h"
#include "../../cluster/engine/cpu/pool.h"
#include "../../cluster/engine/cpu/vectors.h"

extern "C" long linear_block(void);

namespace {

enum { NUM_CALLERS = 4, NUM_THREADS = 3, NUM_TURNS = 200 };
enum { NUM_ROWS = 5, NUM_INPUTS = 64, NUM_OUTPUTS = 300, HEAD_DIM = 64, NUM_HEADS = 4, NUM_KEYS = 150 };

std::vector<float> numbers(size_t count, unsigned seed) {
    std::vector<float> found(count);
    for (float &each : found) each = (float)((seed = seed * 1664525u + 1013904223u) >> 8) / (1 << 24) - 0.5f;
    return found;
}

std::vector<float> product(unsigned seed, int num_threads) {
    const long block = linear_block(), padded = (NUM_OUTPUTS + block - 1) / block * block;
    const std::vector<float> rows = numbers(NUM_ROWS * NUM_INPUTS, seed), weight = numbers(padded * NUM_INPUTS, seed + 1);
    std::vector<float> panels(rows.size()), output(NUM_ROWS * NUM_OUTPUTS);
    linear(rows.data(), panels.data(), weight.data(), nullptr, output.data(), NUM_ROWS, NUM_INPUTS, NUM_OUTPUTS, FLOAT32,
           num_threads);
    return output;
}

/* The last rows of one sequence, one task each. */
std::vector<float> attended(unsigned seed, int num_threads) {
    const std::vector<float> query = numbers(NUM_ROWS * NUM_HEADS * HEAD_DIM, seed);
    const std::vector<float> cache = numbers(NUM_KEYS * 2 * HEAD_DIM, seed + 1);
    std::vector<float> output(query.size());
    std::vector<int64_t> slots(NUM_KEYS), row_slots(NUM_ROWS, (int64_t)(intptr_t)slots.data());
    std::vector<int64_t> contexts(NUM_ROWS), zeros(NUM_ROWS, 0), tasks(NUM_ROWS + 1);
    for (int i = 0; i < NUM_KEYS; i++) slots[i] = NUM_KEYS - 1 - i;
    for (int row = 0; row < NUM_ROWS; row++) contexts[row] = NUM_KEYS - NUM_ROWS + 1 + row;
    for (int row = 0; row <= NUM_ROWS; row++) tasks[row] = row;
    const Attention call = {query.data(), HEAD_DIM, NUM_HEADS * HEAD_DIM, cache.data(), 1, NUM_HEADS, HEAD_DIM,
                            slots.data(), row_slots.data(), contexts.data(), zeros.data(), zeros.data(), tasks.data(),
                            output.data(), nullptr, 0.125f, 0.0f, 0};
    attend(&call, NUM_ROWS, false, false, num_threads);
    return output;
}

}  // namespace

int main() {
    std::vector<int> wrong(NUM_CALLERS, 0);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < NUM_CALLERS; caller++)
        callers.emplace_back([&wrong, caller] {
            const unsigned seed = 17 * caller;
            const std::vector<float> first = product(seed, 1), second = attended(seed, 1);
            for (int turn = 0; turn < NUM_TURNS; turn++)
                wrong[caller] += product(seed, NUM_THREADS) != first || attended(seed, NUM_THREADS) != second;
        });
    for (std::thread &caller : callers) caller.join();
    int total = 0;
    for (int each : wrong) total += each;
    std::printf("%d callers, %d turns each, %d of them wrong\n", NUM_CALLERS, NUM_TURNS, total);
    return total != 0;
}
