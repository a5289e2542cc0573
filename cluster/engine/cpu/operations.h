/* What the sources of this folder offer each other, and kernels.py. */
#ifndef DRAFTHOUSE_OPERATIONS_H
#define DRAFTHOUSE_OPERATIONS_H

#include <cstdint>

/* Of a packed weight, and what it is multiplied by: float32, bfloat16 by float32, bfloat16 by rows rounded to it, where
 * the processor has instructions for that, and integers in groups by rows rounded to 8 bits (groups.h). */
enum Format { FLOAT32 = 0, BF16 = 1, BF16_PRODUCTS = 2, GROUPS = 3 };

/* One attention call; the shapes stand in kernels.py. */
struct Attention {
    const float *query;
    long query_head_stride, query_row_stride;
    const void *cache;
    long num_kv_heads, num_heads, head_dim;
    const int64_t *path_slots, *row_slots, *row_contexts, *row_paths, *row_path_lens, *task_rows;
    float *output;
    const float *sinks;
    float scaling, softcap;
    long window;
};

/* As in causal_lm.py.  Biases, query_norm and key_norm may be null. */
struct DecoderLayer {
    const float *input_norm, *post_norm, *query_norm, *key_norm;
    const void *qkv, *out, *gate_up, *down;
    const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
    int64_t size, num_heads, num_kv_heads, head_dim, inner_size;
    int32_t qkv_format, out_format, gate_up_format, down_format; /* as of `Format` */
    float input_epsilon, post_epsilon, query_epsilon, key_epsilon, scaling;
    int32_t is_rotated; /* whether queries and keys are turned by their positions */
};

/* As in causal_lm.py.  cos, sin: [rows, head_dim]; slots: [rows]; the others as in attention.  The
 * caches hold floats, or bfloat16. */
struct Rows {
    const float *cosines, *sines;
    const int64_t *slots, *path_slots, *row_slots, *row_contexts, *row_paths, *row_path_lens, *task_rows;
    int64_t num_rows, num_seen, num_tasks;
    float *scratch;
    int32_t cache_is_bf16;
};

/* Under which conditions the target draws at a row; as in draws.py.  temperature 0 = greedy; top_k 0,
 * top_p 1, min_p 0: no truncation.  target_ids: the target's id of each column of the logits, which its
 * noise belongs to; null where the columns are the target's ids. */
struct RankedDraw {
    uint64_t seed;
    int64_t position, stream, top_k;
    double temperature, top_p, min_p;
    const int32_t *target_ids;
};

/* Rows of logits and what the target's draws at them depend on; as in draws.py. */
struct DrawShare {
    const float *logits;    /* [num_rows, vocab] */
    const int32_t *parents; /* [num_rows - 1] */
    int64_t num_rows;
    uint64_t seed;
    int64_t position, stream; /* of the first row */
    double temperature;
    const uint32_t *allowed; /* [num_rows, ceil(vocab / 32)], a bit for each token that may be drawn; null = all */
};

/* A product with weights of groups.h.  scratch: as much as the rows take. */
void multiply_groups(const float *rows, void *scratch, const void *weight, const float *bias, float *output, long num_rows,
                     long num_inputs, long num_outputs, int num_threads);
/* is_bf16: the cache.  may_round: queries and weights to bfloat16 too, where the processor multiplies it. */
void attend(const Attention *call, long num_tasks, bool is_bf16, bool may_round, int num_threads);

extern "C" {
void linear(const float *rows, float *panels, const void *weight, const float *bias, float *output, long num_rows,
            long num_inputs, long num_outputs, int format, int num_threads);
void rms_norm(const float *rows, const float *weight, float *output, long num_rows, long size, float epsilon);
void silu_product(const float *rows, float *output, long num_rows, long size);
void rotations(const float *frequencies, long count, long num_positions, float scaling, float *cosines, float *sines);
void gumbel_tokens(const uint64_t *seeds, const int64_t *positions, const int64_t *streams, const int64_t *tokens,
                   long num_rows, long width, float *noise);
void decoder_layers(const DecoderLayer *const *layers, const Rows *rows, void *const *caches, const int64_t *windows,
                    long start, long stop, float *hidden, int num_threads);
void rank_tokens(const float *logits, long row_stride, long num_rows, long vocab_size, long count, const RankedDraw *draws,
                 int64_t *token_ids, double *scores, double *totals, int num_threads);
}

#endif
