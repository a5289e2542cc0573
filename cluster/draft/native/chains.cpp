/* Lookahead: n-grams of what the target said at the rows of its steps. */
#include <cmath>

#include "lookups.h"
#include "steps.h"

namespace {

const double OLDER = 0.7;
const size_t MAX_KEY = 2;

/* The token that the target draws at a row, by its most probable ones. */
int32_t drawn(const int32_t *tokens, const float *logprobs, int64_t count, const Law *law, int64_t position) {
    if (!law || law->divisor == 0.0 || position < 0) return tokens[0];
    int64_t best = 0;
    double most = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        const double score = logprobs[i] / law->divisor + gumbel(law->seed, position, tokens[i], law->stream);
        if (score > most) {
            most = score;
            best = i;
        }
    }
    return tokens[best];
}

class GramPool : public Source {
  public:
    GramPool(int64_t max_contexts, int64_t max_chains, int64_t ngram)
        : after(max_contexts), max_chains(max_chains), ngram(ngram) {}

    void keep(const Rows &rows, const Law *law, int64_t position, int64_t *said) {
        auto paths = rows.paths(ngram - 1);
        std::vector<int64_t> depths(1, 0);
        for (int64_t node = 0; node < rows.num_nodes; node++) depths.push_back(depths[rows.parents[node] + 1] + 1);
        for (size_t row = 0; row < paths.size(); row++) {
            const int64_t first = row * rows.num_top;
            said[row] = drawn(rows.top_tokens + first, rows.top_logprobs + first, rows.num_top, law,
                              position + depths[row]);
            if ((int64_t)paths[row].size() < ngram - 1) continue;
            paths[row].push_back((int32_t)said[row]);
            put(paths[row]);
        }
    }

    int64_t size() const override { return after.size(); }

    Walk &walk(const Text &text, int64_t) override {
        const std::vector<int32_t> &tokens = text.indexed.tokens;
        found.begin();
        for (size_t size = std::min(MAX_KEY, tokens.size()); size > 0; size--) {
            const auto *chains = after.find(key_of(tokens.data() + tokens.size(), size));
            if (!chains) continue;
            double age = 0.0;
            for (auto chain = chains->rbegin(); chain != chains->rend(); chain++)
                found.add(Place{chain->data(), (int64_t)chain->size(), 0, std::pow(OLDER, age++)});
            found.end((int64_t)size);
            return found;
        }
        found.end(0);
        return found;
    }

  private:
    /* An n-gram after its first word, and after its first two. */
    void put(const std::vector<int32_t> &gram) {
        for (size_t size = 1; size <= std::min(MAX_KEY, gram.size() - 1); size++) {
            std::vector<int32_t> chain(gram.begin() + size, gram.end());
            chain.push_back(SEPARATOR);
            auto &chains = after.write(key_of(gram.data() + size, size));
            const auto known = std::find(chains.begin(), chains.end(), chain);
            if (known != chains.end()) chains.erase(known);
            chains.push_back(std::move(chain));
            if ((int64_t)chains.size() > max_chains) chains.erase(chains.begin());
        }
    }

    Newest<std::vector<std::vector<int32_t>>> after; /* chains with a separator behind them, the newest last */
    const int64_t max_chains, ngram;
    PlaceWalk found;
};

}  // namespace

extern "C" {

Source *open_pool(int64_t max_contexts, int64_t max_chains, int64_t ngram) {
    return new GramPool(max_contexts, max_chains, ngram);
}

/* text: null = it is not known how the target draws.  said: int64[rows]. */
void keep_grams(Source *pool, const int32_t *before, int64_t num_before, const int32_t *nodes, const int32_t *parents,
                int64_t num_nodes, const int32_t *top_tokens, const float *top_logprobs, int64_t num_top,
                const Text *text, int64_t position, int64_t *said) {
    const Rows rows{before, num_before, nodes, parents, num_nodes, top_tokens, top_logprobs, num_top};
    static_cast<GramPool *>(pool)->keep(rows, text ? &text->law : nullptr, position, said);
}
}
