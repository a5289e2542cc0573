/* Scores trees: each is walked along the text after it, and entered into the scores of its drafter.
 * The reference, which explains the numbers, is tests/support/spec/in_loops.py.
 */
#include <algorithm>
#include <cmath>
#include <vector>

#include "calibration.h"
#include "trees.h"

namespace {

/* The outcome of one tree. */
struct Outcome {
    std::vector<double> logits, accepted; /* of the nodes that were reached */
    std::vector<int64_t> of_best;                        /* accepted nodes by number of best nodes */
};

void walk(const Scored *given, int64_t tree, int64_t first, int64_t followed, std::vector<char> &on_path,
          std::vector<char> &is_reached) {
    const int64_t count = given->counts[tree], length = given->followed_counts[tree];
    const int32_t *tokens = given->tokens + first, *parents = given->parents + first;
    on_path.assign(count, 0);
    is_reached.assign(count + 1, 0); /* the context first */
    int64_t at = -1;
    for (int64_t step = 0; step < length; step++) {
        is_reached[at + 1] = 1; /* a token followed it */
        int64_t node = at + 1;  /* children stand after their parents */
        while (node < count && !(parents[node] == at && tokens[node] == given->followed[followed + step])) node++;
        if (node >= count) return;
        on_path[node] = 1;
        at = node;
    }
}

void judge(const Scored *given, int64_t tree, int64_t first, int64_t followed, Outcome &found) {
    const int64_t count = given->counts[tree];
    const int32_t *parents = given->parents + first;
    const float *claimed = given->claimed + first;
    static thread_local std::vector<char> on_path, is_reached;
    static thread_local std::vector<int64_t> order;
    walk(given, tree, first, followed, on_path, is_reached);
    found.logits.clear();
    found.accepted.clear();
    for (int64_t node = 0; node < count; node++) {
        const int64_t parent = parents[node];
        if (!is_reached[parent + 1]) continue;
        const double above = parent < 0 ? 1.0 : claimed[parent];
        double ratio = above > 0.0 ? claimed[node] / above : 0.0;
        ratio = ratio > 0.0 ? std::min(ratio, 1.0) : 0.0; /* false for NaN */
        found.logits.push_back(logit(ratio));
        found.accepted.push_back(on_path[node]);
    }
    order.resize(count);
    for (int64_t node = 0; node < count; node++) order[node] = node;
    std::stable_sort(order.begin(), order.end(), [claimed](int64_t a, int64_t b) { return claimed[a] > claimed[b]; });
    found.of_best.assign(given->num_lengths, 0);
    int64_t num_accepted = 0, place = 0;
    for (int64_t rank = 0; rank < count; rank++) {
        num_accepted += on_path[order[rank]];
        while (place < given->num_lengths && given->lengths[place] == rank + 1) found.of_best[place++] = num_accepted;
    }
    while (place < given->num_lengths) found.of_best[place++] = num_accepted;
}

int64_t bin_of(double value, int64_t num_bins) {
    return std::min(std::max((int64_t)value, (int64_t)0), num_bins - 1);
}

/* Updates a calibrator's sums: counts, accepted and claims by bin, forecasts by bin, unfitted nodes. */
void observe(const Scored *given, double *sums, const double *fit, const Outcome &found) {
    const int64_t count = found.logits.size(), bins = given->num_bins, forecasts = given->num_forecast_bins;
    if (count == 0) return;
    double *predictions = sums + 3 * bins;
    const double kept = std::pow(given->node_decay, count);
    for (int64_t i = 0; i < 3 * (bins + forecasts); i++) sums[i] *= kept;
    for (int64_t i = 0; i < count; i++) {
        const double value = found.logits[i], predicted = fitted(value, fit, given->num_knots);
        const int64_t forecast = bin_of(predicted * forecasts, forecasts);
        predictions[forecast] += 1.0;
        predictions[forecasts + forecast] += predicted;
        predictions[2 * forecasts + forecast] += found.accepted[i];
        const int64_t bin = bin_of((value + MAX_LOGIT) * (bins / (2.0 * MAX_LOGIT)), bins);
        sums[bin] += 1.0;
        sums[bins + bin] += found.accepted[i];
        sums[2 * bins + bin] += value;
    }
    sums[3 * (bins + forecasts)] += count;
}

}  // namespace

extern "C" void score_trees(const Scored *given) {
    int64_t first = 0, followed = 0;
    Outcome found;
    for (int64_t tree = 0; tree < given->num_trees; tree++) {
        judge(given, tree, first, followed, found);
        first += given->counts[tree];
        followed += given->followed_counts[tree];
        int64_t *next = given->next_steps[tree];
        const int64_t lengths = given->num_lengths, few = given->few;
        given->accepted[tree] = given->base_lens[tree] < next[few] ? -1 : found.of_best[few];
        for (int64_t which = 0; which < 2; which++) {
            const Score &score = given->scores[2 * tree + which];
            observe(given, score.calibrator, score.fit, found);
            double *sums = score.sums; /* trees; then by length: places, accepted, squares */
            sums[0] = given->tree_decay * sums[0] + 1.0;
            for (int64_t i = 0; i < 3 * lengths; i++) sums[1 + i] *= given->tree_decay;
            for (int64_t i = 0; i < lengths; i++) {
                if (given->base_lens[tree] < next[i]) continue;
                const double accepted = found.of_best[i];
                sums[1 + i] += 1.0;
                sums[1 + lengths + i] += accepted;
                sums[1 + 2 * lengths + i] += accepted * accepted;
            }
        }
        for (int64_t i = 0; i < lengths; i++)
            if (given->base_lens[tree] >= next[i]) next[i] = given->base_lens[tree] + found.of_best[i] + 1;
    }
}
