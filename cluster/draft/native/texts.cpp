/* Texts with their n-grams, and what is learned from how they went on. */
#include <algorithm>
#include <cmath>

#include "lookups.h"

namespace {

const uint64_t MULTIPLIER = 0x9E3779B97F4A7C15ull; /* of token_log.py */
const int64_t STRONGEST = 32; /* evidence beyond it counts as that; as in lookups.py */
const double MEMORY = 2000.0; /* observations after which old ones count half */

}  // namespace

Grams::Grams(int64_t size) : size(size), power(1) {
    for (int64_t i = 0; i < size; i++) power *= MULTIPLIER;
}

Grams::Entry *Grams::find(uint64_t key) {
    /* A linear probe; the table's length is a power of two and a quarter of it at least is free. */
    const size_t mask = table.size() - 1;
    size_t at = (key * MULTIPLIER >> 32) & mask;
    while (table[at].place != -2 && table[at].key != key) at = (at + 1) & mask;
    return &table[at];
}

void Grams::grow() {
    std::vector<Entry> former;
    former.swap(table);
    const size_t live = std::count_if(former.begin(), former.end(), [](const Entry &each) { return each.place >= 0; });
    size_t size = 64;
    while (size < 2 * (live + 1)) size *= 2;
    table.assign(size, Entry{0, -2});
    num_used = live;
    for (const Entry &each : former)
        if (each.place >= 0) *find(each.key) = each;
}

int32_t Grams::newest(uint64_t key) const {
    if (table.empty()) return -1;
    return std::max(const_cast<Grams *>(this)->find(key)->place, -1);
}

void Grams::append(uint64_t key, bool is_whole) {
    const int32_t index = (int32_t)previous.size();
    if (!is_whole) return previous.push_back(-1);
    if (4 * (num_used + 1) > 3 * table.size()) grow();
    Entry *entry = find(key);
    if (entry->place == -2) num_used++;
    previous.push_back(std::max(entry->place, -1));
    *entry = Entry{key, index};
}

void Grams::pop(uint64_t key, bool is_whole) {
    if (is_whole) find(key)->place = previous.back();
    previous.pop_back();
}

IndexedText::IndexedText(const int64_t *sizes, int64_t count) : hashes(1, 0) {
    for (int64_t i = 0; i < count; i++) grams.emplace_back(sizes[i]);
}

void IndexedText::append(const int32_t *added, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        tokens.push_back(added[i]);
        hashes.push_back(hashes.back() * MULTIPLIER + (uint64_t)((int64_t)added[i] + 1));
        const int64_t end = (int64_t)tokens.size();
        for (Grams &each : grams) {
            const bool is_whole = end >= each.size;
            each.append(is_whole ? key(end, each) : 0, is_whole);
        }
    }
}

void IndexedText::truncate(int64_t length) {
    while ((int64_t)tokens.size() > length) {
        const int64_t end = (int64_t)tokens.size();
        for (Grams &each : grams) {
            const bool is_whole = end >= each.size;
            each.pop(is_whole ? key(end, each) : 0, is_whole);
        }
        tokens.pop_back();
        hashes.pop_back();
    }
}

bool Law::is_useful(int64_t position, int32_t token) const {
    if (position + 1 >= max_tokens) return false;
    return position < min_tokens || std::find(stops.begin(), stops.end(), token) == stops.end();
}

double Rates::of(int64_t evidence) const {
    const int64_t level = std::min(evidence, STRONGEST);
    return std::min(std::max(values[level] / values[STRONGEST + 1 + level], 0.005), 0.995);
}

void Rates::record(int64_t evidence, bool is_hit) const {
    double *hits = values + std::min(evidence, STRONGEST), *trials = hits + STRONGEST + 1;
    if (*trials >= MEMORY) {
        *trials *= 0.5;
        *hits *= 0.5;
    }
    *trials += 1.0;
    *hits += is_hit;
}

void Grown::clear() {
    tokens.clear();
    parents.clear();
    survivals.clear();
    evidence.assign(1, 0);
    starts.assign(2, 0);
    known.clear();
}

void Grown::learn(const int32_t *committed, int64_t count, Rates rates) const {
    int64_t node = -1;
    for (int64_t step = 0; step < count && evidence.size() && evidence[node + 1] > 0; step++) {
        const int32_t token = committed[step];
        const auto begin = known.begin() + starts[node + 1], end = known.begin() + starts[node + 2];
        rates.record(evidence[node + 1], std::find(begin, end, token) != end);
        int64_t child = node + 1; /* children stand behind their parents */
        while (child < (int64_t)tokens.size() && !(parents[child] == node && tokens[child] == token)) child++;
        if (child == (int64_t)tokens.size()) return;
        node = child;
    }
}

extern "C" {

Text *open_text(const int64_t *sizes, int64_t count) { return new Text(sizes, count); }

void close_text(Text *text) { delete text; }

/* numbers: stream, max_tokens, min_tokens. */
void set_law(Text *text, uint64_t seed, const int64_t *numbers, double divisor, const int64_t *stops, int64_t count) {
    text->law = Law{seed, numbers[0], numbers[1], numbers[2], divisor, std::vector<int32_t>(stops, stops + count)};
}

/* tokens, logprobs: [count, width], the most probable token first.  said: int64[count]. */
void draws(const Text *text, int64_t position, const int32_t *tokens, const float *logprobs, int64_t count,
           int64_t width, int64_t *said) {
    const Law &law = text->law;
    const bool is_noisy = law.divisor != 0.0 && position >= 0;
    for (int64_t row = 0; row < count; row++, tokens += width, logprobs += width) {
        said[row] = tokens[0];
        double most = -INFINITY;
        for (int64_t i = 0; is_noisy && i < width; i++) {
            const double score = logprobs[i] / law.divisor + gumbel(law.seed, position + row, tokens[i], law.stream);
            if (score <= most) continue;
            most = score;
            said[row] = tokens[i];
        }
    }
}

double rate_of(double *values, int64_t evidence) { return Rates{values}.of(evidence); }

void record_hit(double *values, int64_t evidence, int64_t is_hit) { Rates{values}.record(evidence, is_hit); }

/* rows: of each change the text, its rates, whether they learn from it, how many tokens of the text are kept
 * and how many follow; these stand end to end in `tokens`. */
void advance(int64_t count, const int64_t *rows, const int32_t *tokens) {
    for (int64_t i = 0; i < count; i++, rows += 5) {
        Text &text = *(Text *)rows[0];
        if (rows[2]) text.grown.learn(tokens, rows[4], Rates{(double *)rows[1]});
        text.grown.clear();
        text.num_cuts += rows[3] < (int64_t)text.indexed.tokens.size();
        text.indexed.truncate(rows[3]);
        text.indexed.append(tokens, rows[4]);
        tokens += rows[4];
    }
}
}
