/* The arguments of the functions in this folder. */
#pragma once

#include <cstdint>

/* As in trees.py.  Trees stand end to end; parents count from the start of their tree. */
struct Held {
    int64_t num_trees, num_groups, num_knots;
    const int64_t *counts, *committed_counts, *groups;
    const int64_t *curves;                           /* of each tree, -1 = already calibrated */
    const int32_t *tokens, *parents, *committed;
    const float *claimed, *calibrated;
    const double *losses;                            /* NaN = unknown */
    const double *fits;                              /* [curves, 2 + 2 * knots]: slope, offset, knots, shifts */
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
    const float *survivals;                          /* null = without */
    double max_survival, growth_factor, growth;
};

/* Trees whose outcome is known.  scores: two per tree, as indices into sums, calibrators and fits. */
struct Scored {
    int64_t num_trees, num_lengths, num_bins, num_forecast_bins, num_knots;
    int64_t few;                                     /* index into lengths */
    const int64_t *counts, *followed_counts, *base_lens, *scores, *lengths;
    const int32_t *tokens, *parents, *followed;
    const float *claimed;
    int64_t *const *next_steps;                      /* of each tree, null = a step begins everywhere */
    double *const *sums, *const *calibrators;
    const double *const *fits;
    int64_t *accepted;                               /* of each tree's best few nodes, -1 = no step begins */
    double tree_decay, node_decay;
};
