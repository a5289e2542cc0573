/* Trees whose nodes are the most likely ones, best first. */
#include <algorithm>
#include <cmath>

#include "lookups.h"

namespace {

/* A correct match is modelled as a copy, in which the copied token has this probability. */
const double COPY_MASS = 0.95;

/* Counts tell the target's probabilities roughly, so the noise decides less among them than among probabilities.
 * Along answers of SmolLM2 at T = 0.8, 0.4 has 2 % more of a suffix drafter's drafts accepted than 1, and its claims
 * are 6 % too high in place of 33 %; 0.3 and 0.5 are nearly as good. */
const double COUNT_TRUST = 0.4;

/* The probability that each candidate is the target's token; their sum is below 1.
 *
 * The target emits argmax(log p_i + G[t, i]), whose noise G is shared.  rate: probability that its token is among the
 * candidates.  Greedy: the rate, divided in proportion to the counts.  Sampled: with probability rate / c the text is
 * a copy, in which the candidates have the mass c.  Candidate i then beats all other tokens with probability
 * exp(-(1 - c) * exp(-score_i)), score_i = log(c * count ratio) + G_i, because the best of the others is
 * Gumbel(log(1 - c)).  The average over G is the rate again.  found.trust: how far the scores decide among the
 * candidates; 1 = as here, where counts are probabilities. */
void conditionals(const Law &law, int64_t position, const Found &found, double rate, std::vector<double> &values) {
    const size_t count = found.tokens.size();
    double total = 0.0;
    for (double each : found.counts) total += each;
    values.resize(count);
    if (law.divisor == 0.0) {
        for (size_t i = 0; i < count; i++) values[i] = rate * found.counts[i] / total;
        return;
    }
    const double mass = std::max(COPY_MASS, rate);
    double best = -INFINITY, sum = 0.0;
    for (size_t i = 0; i < count; i++) {
        values[i] = std::log(mass * found.counts[i] / total) + gumbel(law.seed, position, found.tokens[i], law.stream);
        best = std::max(best, values[i]);
    }
    for (double score : values) sum += std::exp(found.trust * (score - best));
    const double share = rate / mass / sum;
    for (double &value : values)
        value = share * std::exp(found.trust * (value - best)) * std::exp(-(1.0 - mass) * std::exp(-value));
}

/* A node that may come next. */
struct Candidate {
    double survival;
    int64_t order; /* of discovery, which breaks ties */
    int32_t parent, token, depth, context;
    bool operator<(const Candidate &other) const {
        return survival < other.survival || (survival == other.survival && order > other.order);
    }
};

}  // namespace

double gumbel(uint64_t seed, int64_t position, int32_t token, int64_t stream) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    uint32_t word0 = (uint32_t)token, word1 = (uint32_t)position, word2 = (uint32_t)stream, word3 = 0;
    for (int round = 0; round < 10; round++) {
        const uint64_t product0 = 0xD2511F53ull * word0, product1 = 0xCD9E8D57ull * word2;
        word0 = (uint32_t)(product1 >> 32) ^ word1 ^ key0;
        word1 = (uint32_t)product1;
        word2 = (uint32_t)(product0 >> 32) ^ word3 ^ key1;
        word3 = (uint32_t)product0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return -std::log(-std::log1p(-(word0 + 0.5) * 0x1p-32));
}

void grow_tree(Text &text, Walk &walk, Rates rates, int64_t position, int64_t max_nodes, double min_survival) {
    Grown &grown = text.grown;
    grown.clear();
    grown.evidence.clear();
    grown.starts.clear();
    std::vector<Candidate> frontier;
    std::vector<int32_t> path;
    std::vector<double> values;
    Found found;
    Candidate next{1.0, 0, -1, 0, 0, 0}; /* the root */
    int64_t discovered = 0;
    for (int64_t node = -1;; node++) {
        path.resize(next.depth);
        for (int32_t above = (int32_t)node, depth = next.depth; depth > 0; above = grown.parents[above])
            path[--depth] = grown.tokens[above];
        found.tokens.clear();
        found.contexts.clear();
        found.counts.clear();
        const bool is_known = walk.look_up(next.context, path, found);
        grown.evidence.push_back(is_known ? found.evidence : 0);
        grown.starts.push_back((int64_t)grown.known.size());
        grown.known.insert(grown.known.end(), found.tokens.begin(), found.tokens.end());
        const int64_t place = position + next.depth;
        if (is_known) conditionals(text.law, place, found, rates.of(found.evidence), values);
        for (size_t i = 0; i < found.tokens.size(); i++) {
            const double survival = next.survival * values[i];
            if (!(survival >= min_survival) || !text.law.is_useful(place, found.tokens[i])) continue;
            frontier.push_back(Candidate{survival, ++discovered, (int32_t)node, found.tokens[i], next.depth + 1,
                                         found.contexts[i]});
            std::push_heap(frontier.begin(), frontier.end());
        }
        if (frontier.empty() || (int64_t)grown.tokens.size() >= max_nodes) break;
        std::pop_heap(frontier.begin(), frontier.end());
        next = frontier.back();
        frontier.pop_back();
        grown.tokens.push_back(next.token);
        grown.parents.push_back(next.parent);
        grown.survivals.push_back((float)next.survival);
    }
    grown.starts.push_back((int64_t)grown.known.size());
}

void PlaceWalk::begin() {
    places.clear();
    groups.clear();
}

void PlaceWalk::end(int64_t match_len) { groups.push_back(Group{0, places.size(), match_len}); }

bool PlaceWalk::look_up(int64_t context, const std::vector<int32_t> &path, Found &found) {
    const Group group = groups[context];
    group_of.clear();
    for (size_t i = group.begin; i < group.end; i++) {
        const Place &place = places[i];
        /* A place near the end of the request's own text runs on into the draft itself; it never runs out,
         * for it lags behind the path that it follows. */
        const int32_t token =
            place.index < place.length ? place.tokens[place.index] : path[place.index - place.length];
        const auto known = std::find(found.tokens.begin(), found.tokens.end(), token);
        const int32_t which = token == SEPARATOR ? -1 : (int32_t)(known - found.tokens.begin());
        group_of.push_back(which);
        if (which < 0) continue;
        if (known == found.tokens.end()) {
            found.tokens.push_back(token);
            found.counts.push_back(0.0);
        }
        found.counts[which] += place.weight;
    }
    if (found.tokens.empty()) return false;
    found.evidence = group.match_len;
    found.trust = COUNT_TRUST;
    for (size_t which = 0; which < found.tokens.size(); which++) {
        const size_t begin = places.size();
        for (size_t i = group.begin; i < group.end; i++) {
            if (group_of[i - group.begin] != (int32_t)which) continue;
            Place place = places[i];
            place.index++;
            places.push_back(place);
        }
        found.contexts.push_back((int32_t)groups.size());
        groups.push_back(Group{begin, places.size(), group.match_len + 1});
    }
    return true;
}

extern "C" void close_source(Source *source) { delete source; }

extern "C" int64_t size_of(const Source *source) { return source->size(); }

/* rows: of each text itself, its source, its rates, the position of the token behind it and how many nodes are
 * wanted.  Trees stand end to end in the arrays; counts: of their nodes. */
extern "C" void grow(int64_t count, const int64_t *rows, double min_survival, int32_t *tokens, int32_t *parents,
                     float *survivals, int64_t *counts) {
    for (int64_t i = 0; i < count; i++, rows += 5) {
        Text &text = *(Text *)rows[0];
        Walk &walk = ((Source *)rows[1])->walk(text, rows[3]);
        grow_tree(text, walk, Rates{(double *)rows[2]}, rows[3], rows[4], min_survival);
        const Grown &grown = text.grown;
        counts[i] = (int64_t)grown.tokens.size();
        tokens = std::copy(grown.tokens.begin(), grown.tokens.end(), tokens);
        parents = std::copy(grown.parents.begin(), grown.parents.end(), parents);
        survivals = std::copy(grown.survivals.begin(), grown.survivals.end(), survivals);
    }
}
