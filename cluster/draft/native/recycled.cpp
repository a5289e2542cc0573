/* Token recycling: what the target thought likely after the same words before. */
#include <cmath>

#include "lookups.h"
#include "steps.h"

namespace {

const double GREEDY_TEMPERATURE = 0.5, LEAST_WEIGHT = 1e-9;

struct Likely {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
};

class Adjacency : public Source, public Walk {
  public:
    Adjacency(int64_t max_contexts, int64_t max_words) : after(max_contexts), max_words(max_words) {}

    void keep(const Rows &rows) {
        const auto paths = rows.paths(max_words);
        for (size_t row = 0; row < paths.size(); row++) {
            const int32_t *tokens = rows.top_tokens + row * rows.num_top;
            const float *logprobs = rows.top_logprobs + row * rows.num_top;
            for (size_t length = 1; length <= paths[row].size(); length++) {
                Likely &likely = after.write(key_of(paths[row].data() + paths[row].size(), length));
                likely.tokens.assign(tokens, tokens + rows.num_top);
                likely.logprobs.assign(logprobs, logprobs + rows.num_top);
            }
        }
    }

    int64_t size() const override { return after.size(); }

    Walk &walk(const Text &text, int64_t) override {
        const std::vector<int32_t> &tokens = text.indexed.tokens;
        const size_t length = std::min((size_t)max_words, tokens.size());
        contexts.assign(1, std::vector<int32_t>(tokens.end() - length, tokens.end()));
        temperature = text.law.divisor == 0.0 ? GREEDY_TEMPERATURE : text.law.divisor;
        return *this;
    }

    bool look_up(int64_t context, const std::vector<int32_t> &, Found &found) override {
        const std::vector<int32_t> words = contexts[context];
        for (size_t length = words.size(); length > 0; length--) {
            const Likely *likely = after.find(key_of(words.data() + words.size(), length));
            if (!likely) continue;
            found.evidence = (int64_t)length;
            found.trust = 1.0; /* these are probabilities */
            found.tokens = likely->tokens;
            for (size_t i = 0; i < likely->tokens.size(); i++) {
                /* A weight of zero has no logarithm. */
                found.counts.push_back(std::max(std::exp(likely->logprobs[i] / temperature), LEAST_WEIGHT));
                found.contexts.push_back((int32_t)contexts.size());
                contexts.push_back(words);
                contexts.back().push_back(likely->tokens[i]);
                if ((int64_t)contexts.back().size() > max_words) contexts.back().erase(contexts.back().begin());
            }
            return true;
        }
        return false;
    }

  private:
    Newest<Likely> after;
    const int64_t max_words;
    double temperature = 1.0;
    std::vector<std::vector<int32_t>> contexts;
};

}  // namespace

extern "C" {

Source *open_adjacency(int64_t max_contexts, int64_t max_words) { return new Adjacency(max_contexts, max_words); }

void keep_likely(Source *adjacency, const int32_t *before, int64_t num_before, const int32_t *nodes,
                 const int32_t *parents, int64_t num_nodes, const int32_t *top_tokens, const float *top_logprobs,
                 int64_t num_top) {
    static_cast<Adjacency *>(adjacency)->keep(
        Rows{before, num_before, nodes, parents, num_nodes, top_tokens, top_logprobs, num_top});
}
}
