/* What every part of a forward computes, a line for each with a digest of its numbers: the same lines wherever it is
 * compiled and run.  See tests/engine/cpu/test_same_bits.py. */
#include <cmath>
#include <cstdio>
#include <vector>

#include "groups.h"
#include "operations.h"
#include "product.h"

extern "C" {
int64_t decoder_layer_scratch(const DecoderLayer *layer, int64_t num_rows);
int64_t draw_tokens(const DrawShare *shares, long num_shares, long vocab_size, float margin, long limit,
                    int32_t *token_ids, int64_t *finalists, int64_t *counts, int num_threads);
}

namespace {

using Floats = std::vector<float>;

enum { SIZE = 96, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 48, INNER = 112, VOCAB = 1000, SLOTS = 96, NUM_THREADS = 2 };
enum { CONTEXT = 70, DELTA = 3, NODES = 4 };

uint32_t state = 1;
uint32_t next_bits() { return (state = state * 1664525u + 1013904223u) >> 8; }

/* Of all sizes up to `most`. */
Floats numbers(size_t count, float most) {
    Floats found(count);
    for (float &each : found) {
        const float value = ((float)next_bits() / (1 << 23) - 1.0f) * most;
        each = std::ldexp(value, -(int)(next_bits() % 4));
    }
    return found;
}

template <typename Number>
void tell(const char *name, const std::vector<Number> &values) {
    uint64_t digest = 0xcbf29ce484222325u;
    const unsigned char *bytes = (const unsigned char *)values.data();
    for (size_t i = 0; i < values.size() * sizeof(Number); i++) digest = (digest ^ bytes[i]) * 0x100000001b3u;
    printf("%s %016llx\n", name, (unsigned long long)digest);
}

/* A weight of outputs x inputs in memory, of random numbers. */
std::vector<uint8_t> weight_of(int format, long outputs, long inputs) {
    if (format == GROUPS) { /* of 4 bits, with minimums of about half of the greatest weight */
        const long unit = groups::unit_bytes(4, 1, true), units = (inputs + groups::UNIT - 1) / groups::UNIT;
        const long blocks = (outputs + groups::OUTPUTS - 1) / groups::OUTPUTS;
        std::vector<uint8_t> made(groups::HEADER_BYTES + blocks * units * unit);
        const groups::Header header = {4, 1, 1};
        memcpy(made.data(), &header, sizeof header);
        for (long at = groups::HEADER_BYTES; at < (long)made.size(); at += unit)
            for (long i = 0; i < unit / 2; i++) {
                const uint32_t bits = next_bits();
                const bool is_scale = i < groups::OUTPUTS, is_minimum = !is_scale && i < 2 * groups::OUTPUTS;
                const uint16_t item = is_scale ? 0x2000 | (bits & 1023) : is_minimum ? 0xac00 | (bits & 1023) : bits;
                memcpy(&made[at + 2 * i], &item, 2);
            }
        return made;
    }
    const Floats given = numbers(outputs * inputs, 0.3f);
    const long blocks = (outputs + BLOCK - 1) / BLOCK, item = format == FLOAT32 ? 4 : 2;
    std::vector<uint8_t> made(blocks * BLOCK * inputs * item);
    for (long o = 0; o < outputs; o++)
        for (long i = 0; i < inputs; i++) {
            const long strip = o / STRIP, lane = o % STRIP;
            const float *from = &given[o * inputs + i];
            if (format == FLOAT32) memcpy(&made[4 * ((strip * inputs + i) * STRIP + lane)], from, 4);
            else round_to_bf16(from, (uint16_t *)&made[2 * ((strip * inputs / 2 + i / 2) * 2 * STRIP + 2 * lane + i % 2)], 1);
        }
    return made;
}

/* Rows of a text and of a tree behind it: a prompt, and what follows it with drafts. */
void forward(const char *name, int format, bool is_bf16) {
    const long width = (HEADS + 2 * KV_HEADS) * HEAD_DIM, kv_size = 2 * KV_HEADS * HEAD_DIM;
    const auto qkv = weight_of(format, width, SIZE), out = weight_of(format, SIZE, HEADS * HEAD_DIM);
    const auto gate_up = weight_of(format, 2 * INNER, SIZE), down = weight_of(format, SIZE, INNER);
    const Floats norms = numbers(SIZE + SIZE + 2 * HEAD_DIM, 1.5f), biases = numbers(width + 2 * INNER, 0.1f);
    const DecoderLayer layer = {&norms[0], &norms[SIZE], &norms[2 * SIZE], &norms[2 * SIZE + HEAD_DIM],
                                qkv.data(), out.data(), gate_up.data(), down.data(),
                                &biases[0], nullptr, &biases[width], nullptr,
                                SIZE, HEADS, KV_HEADS, HEAD_DIM, INNER,
                                format, format, format, format, 1e-5f, 1e-5f, 1e-6f, 1e-6f, 0.14f, true};
    const DecoderLayer *layers[] = {&layer, &layer};
    std::vector<std::vector<uint8_t>> caches(2, std::vector<uint8_t>(SLOTS * kv_size * (is_bf16 ? 2 : 4)));
    void *addresses[] = {caches[0].data(), caches[1].data()};
    const int64_t windows[] = {0, 40};

    std::vector<int64_t> all(SLOTS);
    for (long i = 0; i < SLOTS; i++) all[i] = i * 5 % SLOTS;
    Floats frequencies(HEAD_DIM / 2), cosines(SLOTS * HEAD_DIM), sines(SLOTS * HEAD_DIM);
    for (long i = 0; i < HEAD_DIM / 2; i++) frequencies[i] = std::ldexp(1.0f, -(int)i / 2);
    rotations(frequencies.data(), HEAD_DIM / 2, SLOTS, 1.0f, cosines.data(), sines.data());

    const long parents[NODES] = {-1, 0, 1, -1};
    std::vector<float> states;
    for (long start = 0, count = CONTEXT; start <= CONTEXT; start += CONTEXT, count = DELTA + NODES) {
        const long deltas = start ? DELTA : CONTEXT, end = start + deltas;
        std::vector<int64_t> slots, path_slots, row_slots(count, (int64_t)(intptr_t)all.data()), contexts, paths, lens, tasks;
        Floats turned_x, turned_y, hidden = numbers(count * SIZE, 2.0f);
        for (long row = 0; row < count; row++) {
            const long node = row - deltas;
            slots.push_back(all[start + row]);
            paths.push_back((int64_t)path_slots.size());
            std::vector<long> path;
            for (long each = node; each >= 0; each = parents[each]) path.insert(path.begin(), each);
            for (long each : path) path_slots.push_back(all[end + each]);
            lens.push_back((int64_t)path.size());
            contexts.push_back(node < 0 ? start + row + 1 : end);
            const long position = contexts.back() + lens.back() - 1;
            turned_x.insert(turned_x.end(), &cosines[position * HEAD_DIM], &cosines[(position + 1) * HEAD_DIM]);
            turned_y.insert(turned_y.end(), &sines[position * HEAD_DIM], &sines[(position + 1) * HEAD_DIM]);
        }
        for (long row = 0; row < count; row += 16) tasks.push_back(row);
        tasks.push_back(count);
        Floats scratch(decoder_layer_scratch(&layer, count));
        const Rows rows = {turned_x.data(), turned_y.data(), slots.data(), path_slots.data(), row_slots.data(),
                           contexts.data(), paths.data(), lens.data(), tasks.data(), count, count,
                           (int64_t)tasks.size() - 1, scratch.data(), is_bf16};
        decoder_layers(layers, &rows, addresses, windows, 0, 2, hidden.data(), NUM_THREADS);
        states.insert(states.end(), hidden.begin(), hidden.end());
    }
    tell(name, states);
}

void tell_norms() {
    Floats found;
    for (long size = 1; size < 200; size++) {
        const Floats rows = numbers(2 * size, 5.0f), weight = numbers(size, 2.0f);
        Floats output(2 * size);
        rms_norm(rows.data(), weight.data(), output.data(), 2, size, 1e-5f);
        found.insert(found.end(), output.begin(), output.end());
    }
    tell("norms", found);
}

void tell_gates() {
    const Floats rows = numbers(2 * 4001, 90.0f);
    Floats output(4001);
    silu_product(rows.data(), output.data(), 1, 4001);
    tell("gates", output);
}

void tell_rotations() {
    Floats frequencies = numbers(24, 1.0f), cosines(48 * 9000), sines(48 * 9000);
    rotations(frequencies.data(), 24, 9000, 1.1f, cosines.data(), sines.data());
    tell("cosines", cosines);
    tell("sines", sines);
}

void tell_draws() {
    const long rows = 40, count = 12;
    const Floats logits = numbers(rows * VOCAB, 9.0f);
    std::vector<int32_t> parents(rows - 1, -1), drawn(rows);
    std::vector<int64_t> finalists(rows * 16), counts(rows), ranked(rows * count);
    const DrawShare share = {logits.data(), parents.data(), rows, 77, 5, 1, 0.8, nullptr};
    draw_tokens(&share, 1, VOCAB, 1e-3f, 16, drawn.data(), finalists.data(), counts.data(), NUM_THREADS);
    tell("draws", drawn);
    std::vector<RankedDraw> draws;
    for (long row = 0; row < rows; row++) draws.push_back({(uint64_t)row, row, 0, 0, row % 2 * 0.9, 0.97, 0.0, nullptr});
    std::vector<double> scores(rows * count), totals(rows);
    rank_tokens(logits.data(), VOCAB, rows, VOCAB, count, draws.data(), ranked.data(), scores.data(), totals.data(),
                NUM_THREADS);
    tell("ranks", ranked);
    tell("scores", scores);
    tell("totals", Floats(totals.begin(), totals.end()));
}

}  // namespace

int main() {
    tell_norms();
    tell_gates();
    tell_rotations();
    tell_draws();
    forward("few bits", GROUPS, true);
    forward("bfloat16", BF16, true);
    forward("float32", FLOAT32, false);
    return 0;
}
