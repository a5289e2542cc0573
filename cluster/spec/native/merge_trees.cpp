/* Re-roots the trees of a batch's drafters at the last committed token, calibrates them and merges
 * them sequence by sequence.  `merge_trees` in trees.py explains the numbers; the reference is
 * tests/support/spec/in_loops.py.
 */
#include <algorithm>
#include <cstring>
#include <vector>

#include "calibration.h"
#include "trees.h"

namespace {

const float MIN_REACHED = 1e-6f;

/* Returns the node to which the committed tokens lead; -1 = the root, -2 = out of the tree. */
int64_t walk(const int32_t *tokens, const int32_t *parents, int64_t count, const int32_t *committed, int64_t length) {
    int64_t at = -1;
    for (int64_t step = 0; step < length; step++) {
        int64_t node = at + 1; /* children stand after their parents */
        while (node < count && !(parents[node] == at && tokens[node] == committed[step])) node++;
        if (node >= count) return -2;
        at = node;
    }
    return at;
}

/* Computes calibrated survivals from claims; parents are local, -1 = the context. */
void calibrate(const int64_t *parents, int64_t first, int64_t count, const float *claimed, float *found,
               const double *fit, int64_t num_knots) {
    std::vector<double> shares(count), totals(count + 1, 0.0);
    for (int64_t i = 0; i < count; i++) {
        const int64_t parent = parents[i] - (parents[i] < 0 ? 0 : first);
        const double above = parent < 0 ? 1.0 : claimed[parent];
        double ratio = above > 0.0 ? claimed[i] / above : 0.0;
        ratio = ratio > 0.0 ? std::min(ratio, 1.0) : 0.0; /* false for NaN */
        shares[i] = fitted(logit(ratio), fit, num_knots);
        totals[parent + 1] += shares[i];
    }
    std::vector<double> products(count);
    for (int64_t i = 0; i < count; i++) {
        const int64_t parent = parents[i] - (parents[i] < 0 ? 0 : first);
        const double share = shares[i] / std::max(totals[parent + 1], 1.0);
        products[i] = parent < 0 ? share : products[parent] * share;
        found[i] = (float)products[i];
    }
}

/* Bounds a survival by `above`; negatives and NaN become 0. */
float bounded(float value, float above) { return value > 0.0f ? std::min(value, above) : 0.0f; }

}  // namespace

/* Writes the result into the arrays of `out`, which the caller allocates. */
extern "C" void merge_trees(const Held *held, const Merged *out) {
    int64_t num_left = 0, read = 0, committed = 0;
    std::vector<int64_t> place;
    out->starts[0] = 0;
    for (int64_t tree = 0; tree < held->num_trees; tree++) {
        const int64_t count = held->counts[tree], first = num_left;
        const int32_t *tokens = held->tokens + read, *parents = held->parents + read;
        const float *claimed = held->claimed + read, *known = held->calibrated + read;
        const int64_t root = walk(tokens, parents, count, held->committed + committed, held->committed_counts[tree]);
        const double *fit = held->fits[tree];
        const float reached = root < 0 ? 1.0f : std::max(claimed[root], MIN_REACHED);
        const float known_reached = root < 0 ? 1.0f : std::max(known[root], MIN_REACHED);
        place.assign(count, -1);
        for (int64_t node = root == -2 ? count : root + 1; node < count; node++) {
            const int64_t parent = parents[node];
            if (parent != root && (parent < 0 || place[parent] < 0)) continue;
            place[node] = num_left;
            out->tokens[num_left] = tokens[node];
            out->parents[num_left] = parent == root ? -1 : place[parent];
            out->owners[num_left] = tree;
            const bool has_moved = root >= 0;
            out->claimed[num_left] = has_moved ? std::min(claimed[node] / reached, 1.0f) : claimed[node];
            out->calibrated[num_left] = has_moved ? std::min(known[node] / known_reached, 1.0f) : known[node];
            num_left++;
        }
        if (fit)
            calibrate(out->parents + first, first, num_left - first, out->claimed + first, out->calibrated + first,
                      fit, held->num_knots);
        out->roots[tree] = root;
        out->starts[tree + 1] = num_left;
        read += count;
        committed += held->committed_counts[tree];
    }

    const auto has_nodes = [out](int64_t tree) { return out->starts[tree + 1] > out->starts[tree]; };
    int64_t num_merged = 0, tree = 0;
    std::vector<int64_t> child, sibling; /* of a merged node: its first child, and its parent's next */
    /* For each merged node: the claims for it, and those of drafters that proposed a child of it. */
    std::vector<double> claims, reached, values;
    std::vector<char> has_looked;
    std::vector<float> own(num_left);
    for (int64_t group = 0; group < held->num_groups; group++) {
        const int64_t begin = tree, first = num_merged;
        out->merged_starts[group] = num_merged;
        while (tree < held->num_trees && held->groups[tree] == group) tree++;
        int64_t roots = -1; /* the first child of the context */
        double context = 0.0; /* the shares of those that proposed a child of it */
        child.clear();
        sibling.clear();
        claims.clear();
        reached.clear();
        for (int64_t member = begin; member < tree; member++) {
            if (!has_nodes(member)) continue;
            const double share = held->weights[member];
            context += share;
            has_looked.assign(out->starts[member + 1] - out->starts[member], 0);
            for (int64_t node = out->starts[member]; node < out->starts[member + 1]; node++) {
                const int64_t parent = out->parents[node];
                own[node] = bounded(out->calibrated[node], parent < 0 ? 1.0f : own[parent]);
                const int64_t above = parent < 0 ? -1 : out->places[parent] - first;
                int64_t *head = above < 0 ? &roots : &child[above];
                int64_t found = *head;
                while (found >= 0 && out->merged_tokens[first + found] != out->tokens[node]) found = sibling[found];
                if (found < 0) {
                    found = num_merged - first;
                    out->merged_tokens[num_merged] = out->tokens[node];
                    out->merged_parents[num_merged] = above < 0 ? -1 : first + above;
                    out->merged_owners[num_merged] = group;
                    num_merged++;
                    sibling.push_back(*head);
                    *head = found;
                    child.push_back(-1); /* may invalidate `head` */
                    claims.push_back(0.0);
                    reached.push_back(0.0);
                }
                out->places[node] = first + found;
                claims[found] += share * own[node];
                if (parent >= 0 && !has_looked[parent - out->starts[member]]) {
                    has_looked[parent - out->starts[member]] = 1;
                    reached[above] += share * own[parent];
                }
            }
        }
        values.assign(num_merged - first, 0.0);
        for (int64_t node = first; node < num_merged; node++) {
            const int64_t parent = out->merged_parents[node];
            const double above = parent < 0 ? context : reached[parent - first];
            const double value = parent < 0 ? 1.0 : values[parent - first];
            values[node - first] = above > 0.0 ? value * std::min(claims[node - first] / above, 1.0) : 0.0;
            out->merged_survival[node] = (float)values[node - first];
        }
    }
    out->merged_starts[held->num_groups] = num_merged;
}

/* In bytes, -1 = unknown; a test compares it with the size in Python. */
extern "C" int64_t struct_size(const char *name) {
    if (!strcmp(name, "Held")) return sizeof(Held);
    if (!strcmp(name, "Merged")) return sizeof(Merged);
    if (!strcmp(name, "Checked")) return sizeof(Checked);
    if (!strcmp(name, "Scored")) return sizeof(Scored);
    return -1;
}
