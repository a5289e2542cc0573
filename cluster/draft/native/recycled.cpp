/* Token recycling: what the target thought likely after the same words before. */
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lookups.h"

namespace {

/* As `StepRows`: rows are the text's last one and those of the nodes. */
struct Rows {
    const int32_t *before; /* the text's last words */
    int64_t num_before;
    const int32_t *nodes, *parents;
    int64_t num_nodes;
    const int32_t *top_tokens; /* [rows, num_top], the most probable first */
    const float *top_logprobs;
    int64_t num_top;

    /* The last words at each row. */
    std::vector<std::vector<int32_t>> paths(int64_t longest) const {
        std::vector<std::vector<int32_t>> found;
        found.reserve(num_nodes + 1);
        found.emplace_back(before, before + num_before);
        for (int64_t node = 0; node < num_nodes; node++) {
            found.push_back(found[parents[node] + 1]);
            found.back().push_back(nodes[node]);
            if ((int64_t)found.back().size() > longest) found.back().erase(found.back().begin());
        }
        return found;
    }
};

/* Of the `count` words before `end`. */
uint64_t key_of(const int32_t *end, size_t count) {
    uint64_t key = count;
    for (size_t i = count; i > 0; i--) key = (key + (uint32_t)end[-(int64_t)i]) * 0x9E3779B97F4A7C15ull + 1;
    return key;
}

/* One value per key; those that were written longest ago go. */
template <class Value> class Newest {
  public:
    explicit Newest(int64_t bound) : bound(bound) {}

    Value &write(uint64_t key) {
        const auto known = places.find(key);
        if (known != places.end()) {
            order.splice(order.end(), order, known->second);
            return order.back().second;
        }
        if ((int64_t)places.size() >= bound) {
            places.erase(order.front().first);
            order.pop_front();
        }
        order.emplace_back(key, Value());
        places[key] = std::prev(order.end());
        return order.back().second;
    }

    const Value *find(uint64_t key) const {
        const auto known = places.find(key);
        return known == places.end() ? nullptr : &known->second->second;
    }

    int64_t size() const { return (int64_t)places.size(); }

  private:
    const int64_t bound;
    std::list<std::pair<uint64_t, Value>> order;
    std::unordered_map<uint64_t, typename std::list<std::pair<uint64_t, Value>>::iterator> places;
};

/* A greedy target draws its most probable token, which was not always the most probable one after these words: how
 * much the order of then counts, as a temperature of what was probable then. */
const double GREEDY_TEMPERATURE = 0.5;

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
                /* By the first, the most probable: at a low temperature all of them would be zero. */
                found.counts.push_back(std::exp(((double)likely->logprobs[i] - likely->logprobs[0]) / temperature));
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
