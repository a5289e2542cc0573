/* What drafters keep of the target's steps. */
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <utility>
#include <vector>

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
inline uint64_t key_of(const int32_t *end, size_t count) {
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
