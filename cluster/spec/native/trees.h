/* The arguments of the functions in this folder. */
#pragma once

#include <cstdint>

/* As in trees.py.  Trees stand end to end; parents count from the start of their tree. */
struct Held {
    int64_t num_trees, num_groups, num_knots;
    const int64_t *counts, *committed_counts, *groups;
    const double *const *fits;                       /* of each tree, null = already calibrated: slope, offset, knots, shifts */
    const int32_t *tokens, *parents, *committed;
    const float *claimed, *calibrated;
    const double *weights;
};

/* Parents are places in these arrays.  places: the places of the left nodes in the merged forest. */
struct Merged {
    int64_t *roots, *starts, *parents, *owners, *places;
    int32_t *tokens;
    float *claimed, *calibrated;
    int64_t *merged_starts, *merged_parents, *merged_owners;
    int32_t *merged_tokens;
    float *merged_survival;
};

struct Checked {
    int64_t num_trees, num_ids;
    const int64_t *counts;
    const int32_t *tokens, *parents;
    const float *survivals;
    double max_survival, growth_factor, growth;
};

/* The sums of a score and of its calibrator, and the calibrator's fit. */
struct Score {
    double *sums, *calibrator;
    const double *fit;
};

/* Trees whose outcome is known.  scores: two per tree. */
struct Scored {
    int64_t num_trees, num_lengths, num_bins, num_forecast_bins, num_knots;
    int64_t few;                                     /* index into lengths */
    const int64_t *counts, *followed_counts, *base_lens, *lengths;
    const int32_t *tokens, *parents, *followed;
    const float *claimed;
    int64_t *const *next_steps;                      /* of each tree */
    const Score *scores;
    int64_t *accepted;                               /* of each tree's best few nodes, -1 = no step begins */
    double tree_decay, node_decay;
};
