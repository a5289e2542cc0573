/* What the sources of this folder offer each other, and kernels.py. */
#ifndef DRAFTHOUSE_OPERATIONS_H
#define DRAFTHOUSE_OPERATIONS_H

#include <cstdint>

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

void attend(const Attention *call, long num_tasks, int is_bf16, int num_threads);

extern "C" {
void linear(const float *rows, float *panels, const void *weight, const float *bias, float *output, long num_rows,
            long num_inputs, long num_outputs, int is_bf16, int num_threads);
void rms_norm(const float *rows, const float *weight, float *output, long num_rows, long size, float epsilon);
void silu_product(const float *rows, float *output, long num_rows, long size);
void gumbel_tokens(const uint64_t *seeds, const int64_t *positions, const int64_t *streams, const int64_t *tokens,
                   long num_rows, long width, float *noise);
}

#endif
