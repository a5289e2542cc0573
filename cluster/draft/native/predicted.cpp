/* Drafts along the output that the client expects. */
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "lookups.h"

namespace {

/* An output that agrees on so many tokens with another place has left the one it was at. */
const int64_t SURE = 4;
/* How sure the first predicted token is, before there is any output: as if so many had been right. */
const int64_t EVIDENCE_AT_START = 4;

class Predicted : public Source {
  public:
    Predicted(const int64_t *given, int64_t count, int64_t max_places)
        : tokens(given, given + count), max_places(max_places) {
        tokens.push_back(SEPARATOR);
    }

    /* From the places where the output may be; moves to the best of them where that is sure. */
    Walk &walk(const Text &text, int64_t position) override {
        const std::vector<int32_t> &all = text.indexed.tokens;
        read(text, position);
        found.begin();
        const int64_t size = std::min(position, LONGEST_MATCH);
        const int32_t *end = all.data() + all.size();
        const int64_t here = agreement(end, size, tokens.data() + next, next);
        if (size == 0 || here >= SURE) {
            add(size == 0 ? 0 : next, 1.0);
            found.end(size == 0 ? EVIDENCE_AT_START : here);
            return found;
        }
        options.clear();
        offer(next, here);
        /* Where nothing agrees, something was inserted before the next token, or has replaced it. */
        if (here == 0 && next + 1 < (int64_t)tokens.size()) offer(next + 1, 0);
        offer_agreeing(end, size);
        /* A place farther away must agree on more: short words stand everywhere. */
        for (Option &each : options) each.score = each.length - 0.5 * std::log2(1.0 + distance(each.index));
        std::stable_sort(options.begin(), options.end(), [this](const Option &one, const Option &other) {
            if (one.score != other.score) return one.score > other.score;
            return distance(one.index) < distance(other.index);
        });
        if ((int64_t)options.size() > max_places) options.resize(max_places);
        const Option best = options[0];
        if (best.length >= SURE) next = best.index;
        for (const Option &each : options) add(each.index, std::pow(2.0, each.score - best.score));
        found.end(std::max<int64_t>(best.length, 1));
        return found;
    }

    int64_t size() const override { return (int64_t)tokens.size(); }

  private:
    struct Option {
        int64_t index, length;
        double score;
    };

    /* Follow the output up to the end of the text; from its beginning after a cut. */
    void read(const Text &text, int64_t position) {
        const std::vector<int32_t> &all = text.indexed.tokens;
        const int64_t begin = (int64_t)all.size() - position;
        int64_t at = std::max(begin, read_len);
        if (text.num_cuts != num_cuts) {
            next = 0;
            at = begin;
        }
        for (; at < (int64_t)all.size(); at++) next += tokens[next] == all[at];
        read_len = (int64_t)all.size();
        num_cuts = text.num_cuts;
    }

    int64_t distance(int64_t index) const { return std::abs(index - next); }

    void add(int64_t index, double weight) {
        found.add(Place{tokens.data(), (int64_t)tokens.size(), index, weight});
    }

    void offer(int64_t index, int64_t length) {
        for (Option &each : options)
            if (each.index == index) {
                each.length = length;
                return;
            }
        options.push_back(Option{index, length, 0.0});
    }

    /* The places that agree longest, and for every shorter length the two nearest to where the output was. */
    void offer_agreeing(const int32_t *end, int64_t size) {
        std::vector<std::pair<int64_t, int64_t>> places; /* distance and index */
        std::vector<int64_t> lengths;
        for (int64_t index = 1; index < (int64_t)tokens.size(); index++)
            if (tokens[index - 1] == end[-1]) places.emplace_back(distance(index), index);
        std::sort(places.begin(), places.end());
        for (const auto &each : places)
            lengths.push_back(agreement(end, size, tokens.data() + each.second, each.second));
        for (int64_t length = 1; length <= size; length++) {
            int num_found = 0;
            for (size_t i = 0; i < places.size() && num_found < 2; i++) {
                if (lengths[i] < length) continue;
                offer(places[i].second, length);
                num_found++;
            }
            if (num_found == 0) return;
        }
    }

    std::vector<int32_t> tokens; /* with a separator behind them */
    const int64_t max_places;
    int64_t next = 0; /* index of the token that the output is at */
    int64_t read_len = 0, num_cuts = 0; /* of the text, when it was read */
    std::vector<Option> options;
    PlaceWalk found;
};

}  // namespace

extern "C" Source *open_predicted(const int64_t *tokens, int64_t count, int64_t max_places) {
    return new Predicted(tokens, count, max_places);
}
