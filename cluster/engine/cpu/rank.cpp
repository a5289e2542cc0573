/* What a drafting LM makes of a row of logits: its most probable tokens in the order in which the
 * target may be expected to draw them. */
#include "operations.h"
#include "pool.h"
#include "vectors.h"

namespace {

struct Ranking {
    const float *logits;
    long row_stride, vocab_size, count;
    const RankedDraw *draws;
    int64_t *token_ids;
    double *scores, *totals;
};

enum { MAX_COUNT = 256 };

/* most: the greatest of them. */
double log_total(const float *logits, long size, float most) {
    double total = 0.0;
    long start = 0;
    vfloat sums[PARTS] = {};
    for (; start + SUM_LANES <= size; start += SUM_LANES) {
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) sums[p] += exp_of(*(const vfloat *)(logits + start + p * LANES) - splat(most));
        if (start % (64 * SUM_LANES) == 0) { /* long sums of floats lose what is small */
            total += sum_of(sums);
            for (vfloat &each : sums) each = vfloat{};
        }
    }
    total += sum_of(sums);
    for (; start < size; start++) total += exp_of(logits[start] - most);
    return most + std::log(total);
}

/* The greatest logits in descending order, of equal ones the lower token; returns how many. */
long greatest(const float *logits, long size, long count, int64_t *ids, float *values) {
    long found = 0;
    float least = -INFINITY; /* of `count` found ones */
    const auto look_at = [&](long token) {
        const float value = logits[token];
        if (found == count ? !(value > least) : !(value >= -INFINITY)) return;
        long place = found < count ? found++ : count - 1;
        for (; place > 0 && values[place - 1] < value; place--) {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
        }
        values[place] = value;
        ids[place] = token;
        least = values[found - 1];
    };
    long token = 0;
    for (; token + LANES <= size; token += LANES) {
        if (found == count && !any_of(*(const vfloat *)(logits + token) > splat(least))) continue;
        for (int i = 0; i < LANES; i++) look_at(token + i);
    }
    for (; token < size; token++) look_at(token);
    return found;
}

/* How many of the candidates, descending and divided by the temperature, may be drawn; the first one
 * always.  They stand for the whole vocabulary: the mass below them is neglected. */
long num_allowed(const double *scaled, long count, const RankedDraw &draw) {
    if (draw.top_k > 0 && draw.top_k < count) count = draw.top_k;
    if (draw.top_p >= 1.0 && draw.min_p <= 0.0) return count;
    double total = 0.0, before = 0.0;
    for (long i = 0; i < count; i++) total += std::exp(scaled[i] - scaled[0]);
    for (long i = 0; i < count; i++) {
        const double share = std::exp(scaled[i] - scaled[0]);
        if (i > 0 && (before >= draw.top_p * total || share < draw.min_p)) return i;
        before += share;
    }
    return count;
}

void do_row(void *argument, long row) {
    const Ranking &call = *static_cast<const Ranking *>(argument);
    const float *logits = call.logits + row * call.row_stride;
    int64_t ids[MAX_COUNT];
    float values[MAX_COUNT], noise[MAX_COUNT] = {};
    const long found = greatest(logits, call.vocab_size, call.count, ids, values);
    for (long i = found; i < call.count; i++) ids[i] = 0, values[i] = -INFINITY;
    const RankedDraw &draw = call.draws[row];
    const bool is_sampled = draw.temperature > 0.0;
    double weights[MAX_COUNT];
    for (long i = 0; i < call.count; i++) weights[i] = is_sampled ? values[i] / draw.temperature : values[i];
    long allowed = call.count;
    if (is_sampled) {
        allowed = num_allowed(weights, call.count, draw);
        int64_t named[MAX_COUNT];
        for (long i = 0; i < allowed; i++) named[i] = draw.target_ids ? draw.target_ids[ids[i]] : ids[i];
        gumbel_tokens(&draw.seed, &draw.position, &draw.stream, named, 1, allowed, noise);
    }
    if (call.totals) call.totals[row] = log_total(logits, call.vocab_size, found > 0 ? values[0] : NAN);
    int64_t *token_ids = call.token_ids + row * call.count;
    double *scores = call.scores + row * call.count;
    for (long i = 0; i < call.count; i++) {
        const double score = i < allowed ? weights[i] + noise[i] : -INFINITY;
        long place = i; /* behind its equals */
        for (; place > 0 && scores[place - 1] < score; place--) {
            scores[place] = scores[place - 1];
            token_ids[place] = token_ids[place - 1];
        }
        scores[place] = score;
        token_ids[place] = ids[i];
    }
}

}  // namespace

extern "C" long max_ranked(void) { return MAX_COUNT; }

/* logits [rows, vocab], row_stride floats from row to row; draws: [rows]; the results: [rows, count],
 * count <= max_ranked() and <= vocab_size.  totals: [rows], the logarithm of each row's sum of
 * exponentials, which takes a pass over the vocabulary; null = it is not wanted. */
extern "C" void rank_tokens(const float *logits, long row_stride, long num_rows, long vocab_size, long count,
                            const RankedDraw *draws, int64_t *token_ids, double *scores, double *totals,
                            int num_threads) {
    Ranking call = {logits, row_stride, vocab_size, count, draws, token_ids, scores, totals};
    run_blocks(do_row, &call, num_rows, num_threads);
}
