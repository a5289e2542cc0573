/* A whole decoder layer in one call: norm, q k v, rotation, cache, attention, norm, gated feed-forward.
 *
 * The same functions as for the parts alone; what is saved is the way between them, which for few
 * rows takes longer than attention does.
 */
#include "operations.h"
#include "pool.h"
#include "vectors.h"

/* Rows that one block of the small operations takes: less is not worth a thread's while. */
enum { BLOCK_ROWS = 4 };

namespace {

struct Parts { /* of the scratch memory */
    float *normed, *panels, *qkv, *attended, *gate_up, *inner;
};

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t qkv_size(const DecoderLayer &layer) { return (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim; }

template <typename Function>
struct ByRows {
    const Function &function;
    long num_rows;
    static void block(void *argument, long number) {
        const ByRows &self = *static_cast<const ByRows *>(argument);
        const long stop = (number + 1) * BLOCK_ROWS;
        for (long row = number * BLOCK_ROWS; row < stop && row < self.num_rows; row++) self.function(row);
    }
};

template <typename Function>
void for_rows(long num_rows, int num_threads, const Function &function) {
    ByRows<Function> all = {function, num_rows};
    run_blocks(ByRows<Function>::block, &all, (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS, num_threads);
}

/* One head's x cos + rotate_half(x) sin; `to` may be `from`. */
void rotate(const float *from, float *to, const float *cosines, const float *sines, long head_dim) {
    const long half = head_dim / 2;
    long i = 0;
    for (; i + LANES <= half; i += LANES) {
        const auto at = [i](const float *place) -> const vfloat & { return *(const vfloat *)(place + i); };
        const vfloat low = at(from), high = at(from + half);
        *(vfloat *)(to + i) = fma_of(-high, at(sines), low * at(cosines));
        *(vfloat *)(to + half + i) = fma_of(low, at(sines + half), high * at(cosines + half));
    }
    for (; i < half; i++) {
        const float low = from[i], high = from[half + i];
        to[i] = fma_of(-high, sines[i], low * cosines[i]);
        to[half + i] = fma_of(low, sines[half + i], high * cosines[half + i]);
    }
}

void add(const float *a, const float *b, float *sum, long size) {
    long i = 0;
    for (; i + LANES <= size; i += LANES) *(vfloat *)(sum + i) = *(const vfloat *)(a + i) + *(const vfloat *)(b + i);
    for (; i < size; i++) sum[i] = a[i] + b[i];
}

/* One row's queries in place, keys and values into its slot of the cache. */
void place_row(const DecoderLayer &layer, const Rows &rows, long row, float *qkv, void *cache) {
    const long head_dim = layer.head_dim, kv_size = layer.num_kv_heads * head_dim;
    const float *cosines = rows.cosines + row * head_dim, *sines = rows.sines + row * head_dim;
    float *query = qkv, *key = query + layer.num_heads * head_dim;
    if (layer.query_norm) rms_norm(query, layer.query_norm, query, layer.num_heads, head_dim, layer.query_epsilon);
    if (layer.key_norm) rms_norm(key, layer.key_norm, key, layer.num_kv_heads, head_dim, layer.key_epsilon);
    /* Keys stand behind queries. */
    const long num_rotated = layer.is_rotated ? layer.num_heads + layer.num_kv_heads : 0;
    for (long h = 0; h < num_rotated; h++) rotate(query + h * head_dim, query + h * head_dim, cosines, sines, head_dim);
    /* The row's values stand behind its keys, as they do in a slot. */
    if (rows.cache_is_bf16)
        round_to_bf16(key, static_cast<uint16_t *>(cache) + rows.slots[row] * 2 * kv_size, 2 * kv_size);
    else
        memcpy(static_cast<float *>(cache) + rows.slots[row] * 2 * kv_size, key, 2 * kv_size * 4);
}

}  // namespace

/* Floats of scratch memory that `num_rows` rows take. */
extern "C" int64_t decoder_layer_scratch(const DecoderLayer *layer, int64_t num_rows) {
    const int64_t heads = layer->num_heads * layer->head_dim;
    const int64_t panels = larger(larger(layer->size, heads), layer->inner_size);
    /* The feed-forward's parts lie where attention's were. */
    return num_rows * (layer->size + panels + larger(qkv_size(*layer) + heads, 3 * layer->inner_size));
}

/* In place on hidden [rows, size]; cache [slots, 2, kv_heads, head_dim]. */
static void run_layer(const DecoderLayer &layer, const Rows &rows, void *cache, long window, float *hidden,
                      int num_threads) {
    const long num_rows = rows.num_rows, size = layer.size, heads = layer.num_heads * layer.head_dim;
    const long width = qkv_size(layer), inner_size = layer.inner_size;
    Parts parts;
    parts.normed = rows.scratch;
    parts.panels = parts.normed + num_rows * size;
    parts.qkv = parts.gate_up = parts.panels + num_rows * larger(larger(size, heads), inner_size);
    parts.attended = parts.qkv + num_rows * width;
    parts.inner = parts.gate_up + num_rows * 2 * inner_size;

    for_rows(num_rows, num_threads, [&](long row) {
        rms_norm(hidden + row * size, layer.input_norm, parts.normed + row * size, 1, size, layer.input_epsilon);
    });
    linear(parts.normed, parts.panels, layer.qkv, layer.qkv_bias, parts.qkv, num_rows, size, width, layer.qkv_format,
           num_threads);
    for_rows(num_rows, num_threads, [&](long row) { place_row(layer, rows, row, parts.qkv + row * width, cache); });
    const Attention call = {parts.qkv, layer.head_dim, width, cache, layer.num_kv_heads, layer.num_heads, layer.head_dim,
                            rows.path_slots, rows.row_slots, rows.row_contexts, rows.row_paths, rows.row_path_lens,
                            rows.task_rows, parts.attended, nullptr, layer.scaling, 0.0f, window};
    /* As the products round: what has the same bits on every processor keeps to them here. */
    attend(&call, rows.num_tasks, rows.cache_is_bf16, layer.qkv_format == BF16_PRODUCTS, num_threads);
    memset(parts.attended + rows.num_seen * heads, 0, (num_rows - rows.num_seen) * heads * 4);
    linear(parts.attended, parts.panels, layer.out, layer.out_bias, parts.normed, num_rows, heads, size, layer.out_format,
           num_threads);
    for_rows(num_rows, num_threads, [&](long row) {
        float *normed = parts.normed + row * size, *sum = hidden + row * size;
        add(sum, normed, sum, size);
        rms_norm(sum, layer.post_norm, normed, 1, size, layer.post_epsilon);
    });
    linear(parts.normed, parts.panels, layer.gate_up, layer.gate_up_bias, parts.gate_up, num_rows, size, 2 * inner_size,
           layer.gate_up_format, num_threads);
    for_rows(num_rows, num_threads, [&](long row) {
        silu_product(parts.gate_up + row * 2 * inner_size, parts.inner + row * inner_size, 1, inner_size);
    });
    linear(parts.inner, parts.panels, layer.down, layer.down_bias, parts.normed, num_rows, inner_size, size,
           layer.down_format, num_threads);
    for_rows(num_rows, num_threads,
             [&](long row) { add(hidden + row * size, parts.normed + row * size, hidden + row * size, size); });
}

/* The layers [start, stop) one after the other, in place; caches and windows: one for each. */
extern "C" void decoder_layers(const DecoderLayer *const *layers, const Rows *rows, void *const *caches,
                               const int64_t *windows, long start, long stop, float *hidden, int num_threads) {
    for (long i = start; i < stop; i++) run_layer(*layers[i], *rows, caches[i], windows[i], hidden, num_threads);
}
