/* Checks trees as `tree_check.py`, the reference, does. */
#include <algorithm>
#include <vector>

#include "trees.h"

extern "C" int64_t are_sound(const Checked *given) {
    std::vector<uint64_t> edges;
    int64_t first = 0;
    for (int64_t tree = 0; tree < given->num_trees; tree++) {
        const int64_t count = given->counts[tree];
        const int32_t *tokens = given->tokens + first, *parents = given->parents + first;
        const float *survivals = given->survivals + first;
        edges.clear();
        for (int64_t node = 0; node < count; node++) {
            const int64_t parent = parents[node];
            if (parent < -1 || parent >= node) return 0;
            if (tokens[node] < 0 || tokens[node] >= given->num_ids) return 0;
            edges.push_back((uint64_t)(parent + 1) << 32 | (uint32_t)tokens[node]);
            const double value = survivals[node];
            if (!(value >= 0.0 && value <= given->max_survival)) return 0; /* false for NaN */
            if (parent >= 0 && value > given->growth_factor * (double)survivals[parent] + given->growth) return 0;
        }
        std::sort(edges.begin(), edges.end());
        if (std::adjacent_find(edges.begin(), edges.end()) != edges.end()) return 0;
        first += count;
    }
    return 1;
}
