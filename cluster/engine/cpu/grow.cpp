/* Trees of a drafting LM that grow pass by pass in one call: the likeliest leaves of all requests are
 * evaluated, their candidates ranked, and the best of these become leaves in turn.
 *
 * A pass of a small model computes for a third of a millisecond; the way around it in Python takes
 * longer than that.
 */
#include <algorithm>
#include <chrono>
#include <set>
#include <vector>

#include "operations.h"
#include "pool.h"
#include "vectors.h"

/* As in growth.py.  embedding: [vocab, size]; cosines, sines: [positions, head_dim]; output: packed
 * for `linear`.  row_size: floats of scratch memory that a layer takes per row. */
struct GrowingModel {
    const DecoderLayer *const *layers;
    void *const *caches;
    const int64_t *windows;
    const void *embedding;
    const float *cosines, *sines, *norm, *output_bias;
    const void *output;
    int64_t num_layers, size, head_dim, output_size, max_context_len, row_size;
    int32_t output_format, cache_is_bf16, embedding_is_bf16;
    float norm_epsilon;
};

struct Growth { /* as in growth.py; scratch: floats, `growth_scratch` of them */
    int64_t num_candidates, num_children, width, max_rows, vocab_size;
    double min_survival, kept_share, max_seconds;
    const int32_t *interrupted; /* ends the call after the pass under way where it is not 0 */
    float *scratch;
};

/* As in growth.py.  Nodes are numbered as in `LiveTree`; expanded ones but the root have a slot.
 * The first `num_slots` slots and `num_leaves` leaves are there; what grows is appended, with the
 * leaves in heap order.  `expanded`: of each node expanded here, in order, the root included. */
struct GrowingTree {
    /* What the request's draws depend on; `draw.position` is that of the token after the root. */
    RankedDraw draw;
    double tau, coverage;
    int64_t max_tokens, min_tokens, num_stop_tokens;
    const int32_t *stop_tokens;
    /* The text: slot by position, tokens with KV, and those without, the root's the last. */
    const int64_t *slots;
    const int32_t *delta;
    int64_t context_len, num_delta;
    /* The tree. */
    int64_t max_slots, num_slots, num_leaves, num_nodes, num_expanded;
    /* Only leaves that may have a child among the `num_wanted` likeliest nodes are expanded; 0 = all. */
    int64_t num_wanted, num_best;
    int32_t *slot_tokens, *slot_parents;                         /* [max_slots]; parent -1 = the root */
    int32_t *leaves, *leaf_tokens, *leaf_parents, *leaf_depths;  /* node, token, its parent's slot, depth */
    double *leaf_survivals;
    const double *best_survivals;                /* [num_best], at most num_wanted, in no order */
    int32_t *expanded, *num_children, *children; /* [slots + 1]; tokens of all children side by side */
    double *survivals;                           /* of the children */
    int64_t *token_ids;                          /* [slots + 1, candidates]: the rankings */
    double *scores;
};

namespace {

using Clock = std::chrono::steady_clock;

enum { TASK_ROWS = 16 }; /* as attention.py's _MAX_TASK_ROWS */

struct Leaf {
    double survival;
    int32_t node, token, parent_slot, depth;
    /* Of equally likely ones the older first, as in Python's heap. */
    bool operator<(const Leaf &other) const {
        return survival != other.survival ? survival < other.survival : node > other.node;
    }
};

/* A row that is ranked: a node to be expanded, or the root. */
struct Ranked {
    long tree;
    Leaf leaf;
};

struct Tree {
    GrowingTree *of;
    std::vector<Leaf> heap;
    std::multiset<double> wanted; /* survivals of the likeliest nodes, the least one in front */
    long num_children_written = 0;
    double best() const { return heap.empty() ? 0.0 : heap.front().survival; }
    /* As LiveTree's least_worth. */
    double least_worth(double kept_share) const {
        const bool is_full = of->num_wanted && (long)wanted.size() == of->num_wanted;
        return is_full ? *wanted.begin() / kept_share : 0.0;
    }
    void note(double survival) {
        if (of->num_wanted) wanted.insert(survival);
        if ((long)wanted.size() > of->num_wanted) wanted.erase(wanted.begin());
    }
    Leaf pop() {
        std::pop_heap(heap.begin(), heap.end());
        const Leaf leaf = heap.back();
        heap.pop_back();
        return leaf;
    }
    void push(const Leaf &leaf) {
        heap.push_back(leaf);
        std::push_heap(heap.begin(), heap.end());
    }
};

/* One forward's rows, as the layers take them. */
struct Batch {
    std::vector<int64_t> tokens, positions, slots, path_slots, row_slots, contexts, paths, path_lens, tasks, logit_rows;

    long num_rows() const { return (long)tokens.size(); }

    void add(const GrowingModel &model, const GrowingTree &tree, int64_t token, int64_t position, int64_t key) {
        tokens.push_back(token);
        positions.push_back(std::min(position, model.max_context_len - 1));
        slots.push_back(tree.slots[key]);
        row_slots.push_back((int64_t)(intptr_t)tree.slots);
        paths.push_back((int64_t)path_slots.size());
    }

    void add_delta(const GrowingModel &model, const GrowingTree &tree) {
        const long start = num_rows();
        for (long i = 0; i < tree.num_delta; i++) {
            const int64_t position = tree.context_len + i;
            add(model, tree, tree.delta[i], position, position);
            contexts.push_back(position + 1);
            path_lens.push_back(0);
        }
        logit_rows.push_back(num_rows() - 1);
        add_tasks(start);
    }

    /* `leaf` in the slot that it has just been given. */
    void add_leaf(const GrowingModel &model, const GrowingTree &tree, const Leaf &leaf, long slot) {
        const int64_t first = tree.context_len;
        add(model, tree, leaf.token, first + leaf.depth - 1, first + slot);
        contexts.push_back(first);
        const long start = (long)path_slots.size();
        for (long each = slot; each >= 0; each = tree.slot_parents[each]) path_slots.push_back(tree.slots[first + each]);
        std::reverse(path_slots.begin() + start, path_slots.end()); /* ancestors first */
        path_lens.push_back((long)path_slots.size() - start);
        logit_rows.push_back(num_rows() - 1);
    }

    void add_tasks(long start) {
        for (long row = start; row < num_rows(); row += TASK_ROWS) tasks.push_back(row);
    }
};

struct Memory { /* parts of the scratch memory for `rows` rows */
    float *hidden, *cosines, *sines, *normed, *panels, *logits, *layers;
    Memory(const GrowingModel &model, float *scratch, long rows) {
        hidden = scratch;
        cosines = hidden + rows * model.size;
        sines = cosines + rows * model.head_dim;
        normed = sines + rows * model.head_dim;
        panels = normed + rows * model.size;
        logits = panels + rows * model.size;
        layers = logits + rows * model.output_size;
    }
};

bool is_useful(const GrowingTree &tree, int64_t position, int64_t token) {
    if (position + 1 >= tree.max_tokens) return false;
    if (position < tree.min_tokens) return true;
    return std::find(tree.stop_tokens, tree.stop_tokens + tree.num_stop_tokens, token) ==
           tree.stop_tokens + tree.num_stop_tokens;
}

/* The leaves to be expanded next: those of all trees compete by survival. */
std::vector<std::vector<Leaf>> choose(std::vector<Tree> &trees, const Growth &growth) {
    long rows = 0;
    for (const Tree &tree : trees)
        if (tree.of->num_delta == 0 && tree.of->num_slots < tree.of->max_slots) rows += growth.width;
    rows = std::min<long>(rows, growth.max_rows);
    std::vector<std::vector<Leaf>> chosen(trees.size());
    while (rows > 0) {
        long found = -1;
        double best = 0.0;
        for (long index = 0; index < (long)trees.size(); index++) {
            const Tree &tree = trees[index];
            if (tree.of->num_delta || tree.of->num_slots + (long)chosen[index].size() >= tree.of->max_slots) continue;
            if (tree.best() > best && tree.best() >= tree.least_worth(growth.kept_share)) found = index, best = tree.best();
        }
        if (found < 0 || best < growth.min_survival) break;
        chosen[found].push_back(trees[found].pop());
        rows--;
    }
    /* By number, so that slots are given in the order of nodes, parents first. */
    for (auto &leaves : chosen)
        std::sort(leaves.begin(), leaves.end(), [](const Leaf &a, const Leaf &b) { return a.node < b.node; });
    return chosen;
}

/* Logits of the batch's logit rows, [logit rows, output_size], in memory.logits. */
void forward(const GrowingModel &model, const Batch &batch, const Memory &memory, int num_threads) {
    const long num_rows = batch.num_rows(), size = model.size, head_dim = model.head_dim;
    for (long row = 0; row < num_rows; row++) {
        const int64_t first = batch.tokens[row] * size;
        for (long i = 0; i < size; i++)
            memory.hidden[row * size + i] = model.embedding_is_bf16
                ? bf16_to_float(((const uint16_t *)model.embedding)[first + i]) : ((const float *)model.embedding)[first + i];
        memcpy(memory.cosines + row * head_dim, model.cosines + batch.positions[row] * head_dim, head_dim * 4);
        memcpy(memory.sines + row * head_dim, model.sines + batch.positions[row] * head_dim, head_dim * 4);
    }
    const Rows rows = {memory.cosines, memory.sines, batch.slots.data(), batch.path_slots.data(), batch.row_slots.data(),
                       batch.contexts.data(), batch.paths.data(), batch.path_lens.data(), batch.tasks.data(), num_rows,
                       num_rows, (int64_t)batch.tasks.size() - 1, memory.layers, model.cache_is_bf16};
    decoder_layers(model.layers, &rows, model.caches, model.windows, 0, model.num_layers, memory.hidden, num_threads);
    const long num_wanted = (long)batch.logit_rows.size();
    for (long i = 0; i < num_wanted; i++)
        rms_norm(memory.hidden + batch.logit_rows[i] * size, model.norm, memory.normed + i * size, 1, size,
                 model.norm_epsilon);
    linear(memory.normed, memory.panels, model.output, model.output_bias, memory.logits, num_wanted, size,
           model.output_size, model.output_format, num_threads);
}

/* The node's children: its best candidates, as far as they are of use. */
void expand(Tree &grown, const Leaf &node, long slot, const int64_t *token_ids, const double *scores,
            const GrowingModel &model, const Growth &growth) {
    GrowingTree &tree = *grown.of;
    const long count = growth.num_candidates, number = tree.num_expanded++;
    memcpy(tree.token_ids + number * count, token_ids, count * sizeof *token_ids);
    memcpy(tree.scores + number * count, scores, count * sizeof *scores);
    double total = 0.0;
    for (long i = 0; i < count; i++) total += std::exp((scores[i] - scores[0]) / tree.tau);
    const int64_t position = tree.draw.position + node.depth; /* of the children's tokens */
    const bool grows = tree.context_len + node.depth < model.max_context_len && position + 2 < tree.max_tokens;
    long num_children = 0;
    for (long i = 0; i < growth.num_children; i++) {
        const double share = tree.coverage * std::exp((scores[i] - scores[0]) / tree.tau) / total;
        if (!(share > 0.0) || !is_useful(tree, position, token_ids[i])) continue;
        const Leaf child = {node.survival * share, (int32_t)tree.num_nodes++, (int32_t)token_ids[i], (int32_t)slot,
                            node.depth + 1};
        tree.children[grown.num_children_written] = child.token;
        tree.survivals[grown.num_children_written++] = child.survival;
        num_children++;
        grown.note(child.survival);
        if (grows) grown.push(child);
    }
    tree.expanded[number] = node.node;
    tree.num_children[number] = num_children;
}

bool is_over(const Growth &growth, Clock::time_point start) {
    if (*(const volatile int32_t *)growth.interrupted) return true;
    return std::chrono::duration<double>(Clock::now() - start).count() >= growth.max_seconds;
}

}  // namespace

/* Floats of scratch memory for passes of at most `num_rows` rows. */
extern "C" int64_t growth_scratch(const GrowingModel *model, int64_t num_rows) {
    return num_rows * (3 * model->size + 2 * model->head_dim + model->output_size + model->row_size);
}

/* Returns how many passes were made.  Scratch memory is for max_rows rows and those of all deltas. */
extern "C" int64_t grow_trees(const GrowingModel *model, const Growth *growth, GrowingTree *const *growing,
                              int64_t num_trees, int num_threads) {
    const Clock::time_point start = Clock::now();
    std::vector<Tree> trees(num_trees);
    for (long index = 0; index < num_trees; index++) {
        Tree &tree = trees[index];
        const GrowingTree &of = *(tree.of = growing[index]);
        for (long i = 0; i < of.num_leaves; i++)
            tree.heap.push_back({of.leaf_survivals[i], of.leaves[i], of.leaf_tokens[i], of.leaf_parents[i], of.leaf_depths[i]});
        std::make_heap(tree.heap.begin(), tree.heap.end());
        for (long i = 0; i < of.num_best; i++) tree.note(of.best_survivals[i]);
    }
    std::vector<int64_t> token_ids;
    std::vector<double> scores;
    std::vector<RankedDraw> draws;
    int64_t passes = 0;
    for (; passes == 0 || !is_over(*growth, start); passes++) {
        const auto chosen = choose(trees, *growth);
        Batch batch;
        std::vector<Ranked> ranked;
        std::vector<long> slots;
        for (long index = 0; index < num_trees; index++) {
            GrowingTree &tree = *trees[index].of;
            if (tree.num_delta) {
                batch.add_delta(*model, tree);
                ranked.push_back({index, {1.0, 0, 0, -1, 0}});
                slots.push_back(-1);
                continue;
            }
            const long first = batch.num_rows();
            for (const Leaf &leaf : chosen[index]) {
                const long slot = tree.num_slots++;
                tree.slot_tokens[slot] = leaf.token;
                tree.slot_parents[slot] = leaf.parent_slot;
                batch.add_leaf(*model, tree, leaf, slot);
                ranked.push_back({index, leaf});
                slots.push_back(slot);
            }
            batch.add_tasks(first);
        }
        if (ranked.empty()) break;
        batch.tasks.push_back(batch.num_rows());
        const long num_ranked = (long)ranked.size(), count = growth->num_candidates;
        const Memory memory(*model, growth->scratch, batch.num_rows());
        forward(*model, batch, memory, num_threads);
        draws.clear();
        for (const Ranked &row : ranked) {
            draws.push_back(trees[row.tree].of->draw);
            draws.back().position += row.leaf.depth;
        }
        token_ids.resize(num_ranked * count);
        scores.resize(num_ranked * count);
        rank_tokens(memory.logits, model->output_size, num_ranked, growth->vocab_size, count, draws.data(),
                    token_ids.data(), scores.data(), nullptr, num_threads);
        for (long i = 0; i < num_ranked; i++) {
            Tree &tree = trees[ranked[i].tree];
            if (tree.of->num_delta) {
                tree.of->context_len += tree.of->num_delta;
                tree.of->num_delta = 0;
            }
            expand(tree, ranked[i].leaf, slots[i], &token_ids[i * count], &scores[i * count], *model, *growth);
        }
    }
    for (Tree &tree : trees) {
        GrowingTree &of = *tree.of;
        of.num_leaves = (int64_t)tree.heap.size();
        for (long i = 0; i < of.num_leaves; i++) {
            of.leaves[i] = tree.heap[i].node;
            of.leaf_survivals[i] = tree.heap[i].survival;
        }
    }
    return passes;
}

/* In bytes, -1 = unknown; a test compares it with the size in Python. */
extern "C" int64_t struct_size(const char *name) {
#define SIZE_OF(type) \
    if (!strcmp(name, #type)) return sizeof(type)
    SIZE_OF(DecoderLayer);
    SIZE_OF(Rows);
    SIZE_OF(RankedDraw);
    SIZE_OF(DrawShare);
    SIZE_OF(GrowingModel);
    SIZE_OF(Growth);
    SIZE_OF(GrowingTree);
#undef SIZE_OF
    return -1;
}
