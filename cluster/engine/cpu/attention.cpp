/* Tree attention over paged keys and values.
 *
 * A row sees the first `context` tokens of its sequence and then the nodes of its own path; in that
 * order, a token's place among them is its absolute position.  Keys are taken in chunks whose
 * borders are absolute positions, and every sum runs in an order that depends on positions alone.
 * So a row's result depends on its own prefix and on nothing else, to the bit: not on the batch, nor
 * on whether a token is committed context or a node of a tree.  That holds for finite values:
 * keys that a row does not see (later ones of its sequence, or scratch) weigh 0, and 0 times a value
 * that is no number is none.
 *
 * A task lays out a chunk's keys and values once for the products of all of its rows and heads.  Where
 * a row's nodes belong into the chunk they are put there for that row.
 *
 * The softmax is computed chunk by chunk with a running maximum (Milakov and Gimelshein 2018).
 */
#include <algorithm>
#include <vector>

#include "amx.h"
#include "chunk.h"
#include "operations.h"
#include "pool.h"
#include "vectors.h"

enum { MAX_TASK_ROWS = 16, MAX_SHARING = 16 };
/* Rows of the products: a row of a task for one head is one. */
enum { GROUP = 16 };

namespace {

/* What the running softmax of one row and head has come to. */
struct Running {
    float maximum, sum;
};

/* A row's scores of a chunk, of which `start` to `stop` are seen, become its weights, 0 where it sees
 * none.  Returns what the former weights are to be multiplied by. */
template <Cache cache>
INLINE float weigh(const Attention &call, float *scores, Item<cache> *weights, Running &running, int start, int stop) {
    vfloat highest = splat(-INFINITY);
    for (int j = 0; j < CHUNK; j += LANES) {
        vfloat score = *(const vfloat *)(scores + j) * splat(call.scaling);
        if (call.softcap > 0)
            for (int i = 0; i < LANES; i++) score[i] = call.softcap * std::tanh(score[i] / call.softcap);
        if (j < start || j + LANES > stop) {
            vint place = {};
            for (int i = 0; i < LANES; i++) place[i] = j + i;
            score = (place >= start) & (place < stop) ? score : splat(-INFINITY);
        }
        *(vfloat *)(scores + j) = score;
        highest = score > highest ? score : highest;
    }
    const float seen = maximum_of(highest), former = running.maximum;
    const float maximum = seen > former ? seen : former;
    vfloat sums[PARTS] = {};
#pragma GCC unroll 16
    for (int j = 0; j < CHUNK; j += LANES) {
        const vfloat score = *(const vfloat *)(scores + j);
        const vfloat power = score == splat(-INFINITY) ? vfloat{} : exp_of(score - splat(maximum));
        *(vfloat *)(scores + j) = power;
        sums[j / LANES % PARTS] += power;
    }
    if constexpr (cache == BF16_PAIRS) round_to_bf16(scores, reinterpret_cast<uint16_t *>(weights), CHUNK);
    else memcpy(weights, scores, CHUNK * 4);
    const float shrunk = former == maximum ? 1.0f : former == -INFINITY ? 0.0f : exp_of(former - maximum);
    running = {maximum, fma_of(running.sum, shrunk, sum_of(sums))};
    return shrunk;
}

/* One task: up to MAX_TASK_ROWS neighbouring rows of one sequence, and one head of the keys.  Its queries are
 * each row's heads, one row after the other. */
template <Cache cache>
class Task {
  public:
    Task(const Attention &call, long number)
        : call(call), head_dim(call.head_dim), sharing(call.num_heads / call.num_kv_heads),
          head(number % call.num_kv_heads * sharing), first_row(call.task_rows[number / call.num_kv_heads]),
          num_rows(call.task_rows[number / call.num_kv_heads + 1] - first_row), depth(head_dim / PER_ITEM<cache>),
          key_size(head_dim * SIZE<cache>), slot_size(2 * call.num_kv_heads * key_size),
          first_key(static_cast<const char *>(call.cache) + number % call.num_kv_heads * key_size),
          slots(reinterpret_cast<const int64_t *>(call.row_slots[first_row])),
          is_tiled(cache == BF16_PAIRS && has_tiles && head_dim % TILE_INPUTS == 0) {}

    void run() {
        static thread_local std::vector<uint32_t> memory;
        const long num_queries = num_rows * sharing;
        const size_t wanted = (num_queries + GROUP + 2 * CHUNK) * depth + GROUP * head_dim + LINE / 4;
        if (memory.size() < wanted) memory.resize(wanted);
        const auto address = reinterpret_cast<uintptr_t>(memory.data());
        queries = reinterpret_cast<Item<cache> *>((address + LINE - 1) / LINE * LINE);
        packed.keys = queries + (num_queries + GROUP) * depth; /* tiles take in the rows behind the last one */
        packed.values = packed.keys + CHUNK * depth;
        sums = reinterpret_cast<float *>(packed.values + CHUNK * depth);
        packed.head_dim = head_dim;
        packed.value_offset = call.num_kv_heads * head_dim;
        long begin = INT64_MAX, end = 0;
        for (long r = 0; r < num_rows; r++) {
            contexts[r] = call.row_contexts[first_row + r];
            totals[r] = contexts[r] + call.row_path_lens[first_row + r];
            starts[r] = call.window > 0 && totals[r] > call.window ? totals[r] - call.window : 0;
            begin = std::min<long>(starts[r], begin);
            end = std::max<long>(totals[r], end);
            num_shared = std::max<long>(contexts[r], num_shared);
        }
        for (long q = 0; q < num_queries; q++) {
            const float *query = call.query + (head + q % sharing) * call.query_head_stride +
                                 (first_row + q / sharing) * call.query_row_stride;
            if constexpr (cache == BF16_PAIRS)
                round_to_bf16(query, reinterpret_cast<uint16_t *>(queries + q * depth), head_dim);
            else
                memcpy(queries + q * depth, query, head_dim * 4);
            running[q] = {-INFINITY, 0.0f};
            memset(output_of(q), 0, head_dim * 4);
        }
        if (is_tiled) shape_tiles();
        for (chunk = begin / CHUNK * CHUNK; chunk < end; chunk += CHUNK) enter_chunk();
        if (is_tiled) release_tiles();
        for (long q = 0; q < num_queries; q++) {
            float sum = running[q].sum, factor = 1.0f;
            if (call.sinks) { /* one more logit, without a value */
                const float sink = call.sinks[head + q % sharing], maximum = fmaxf(sink, running[q].maximum);
                factor = exp_of(running[q].maximum - maximum);
                sum = fma_of(sum, factor, exp_of(sink - maximum));
            }
            for (long d = 0; d < head_dim; d += LANES) *(vfloat *)(output_of(q) + d) *= splat(factor / sum);
        }
    }

  private:
    float *output_of(long query) const {
        return call.output + ((first_row + query / sharing) * call.num_heads + head + query % sharing) * head_dim;
    }
    const char *key_of(int64_t slot) const { return first_key + slot * slot_size; }
    long num_shared_from(long first) const { return std::max<long>(0, std::min<long>(num_shared - first, CHUNK)); }
    bool sees_chunk(long r) const { return totals[r] > chunk && starts[r] < chunk + CHUNK; }
    bool has_nodes_in_chunk(long r) const { return totals[r] > contexts[r] && contexts[r] < chunk + CHUNK; }

    void enter_chunk() {
        const void *shared[CHUNK], *next[CHUNK];
        const long count = num_shared_from(chunk), num_next = num_shared_from(chunk + CHUNK);
        for (long j = 0; j < count; j++) shared[j] = key_of(slots[chunk + j]);
        for (long j = 0; j < num_next; j++) next[j] = key_of(slots[chunk + CHUNK + j]);
        packed.fill(shared, (int)count, next, (int)num_next);
        for (long r = 0, stop; r < num_rows; r = stop) {
            stop = r + 1;
            if (!sees_chunk(r)) continue;
            if (has_nodes_in_chunk(r)) {
                const int64_t *path = call.path_slots + call.row_paths[first_row + r];
                const long stop_place = std::min<long>(totals[r], chunk + CHUNK);
                for (long place = std::max<long>(chunk, contexts[r]); place < stop_place; place++)
                    packed.put((int)(place - chunk), key_of(path[place - contexts[r]]));
            } else {
                while (stop < num_rows && sees_chunk(stop) && !has_nodes_in_chunk(stop)) stop++;
            }
            for (long q = r * sharing; q < stop * sharing; q += GROUP)
                enter_group(q, (int)std::min<long>(stop * sharing - q, GROUP));
        }
    }

    /* The chunk's keys enter `count` queries from `first` on. */
    void enter_group(long first, int count) {
        int stops[GROUP], columns = 0;
        for (int i = 0; i < count; i++) {
            stops[i] = (int)std::min<long>(totals[(first + i) / sharing] - chunk, CHUNK);
            columns = std::max(columns, stops[i]);
        }
        multiply(queries + first * depth, count, depth, depth, packed.keys, CHUNK, columns, scores);
        float shrunk[GROUP];
        for (int i = 0; i < count; i++)
            shrunk[i] = weigh<cache>(call, scores + i * CHUNK, weights + i * ITEMS, running[first + i],
                                     (int)std::max<long>(starts[(first + i) / sharing] - chunk, 0), stops[i]);
        const long used = (columns + PER_ITEM<cache> - 1) / PER_ITEM<cache>;
        multiply(weights, count, ITEMS, used, packed.values, head_dim, head_dim, sums);
        for (int i = 0; i < count; i++) {
            float *output = output_of(first + i);
            for (long d = 0; d < head_dim; d += LANES) {
                vfloat &sum = *(vfloat *)(output + d);
                sum = fma_of(sum, splat(shrunk[i]), *(vfloat *)(sums + i * head_dim + d));
            }
        }
    }

    /* As chunk.h's; tiles take everything in. */
    void multiply(const Item<cache> *rows, int count, long row_size, long used, const Item<cache> *matrix, long width,
                  long columns, float *to) const {
        if constexpr (cache == BF16_PAIRS)
            if (is_tiled) return multiply_in_tiles(rows, row_size, matrix, width, to);
        multiply_rows<cache>(rows, count, row_size, used, matrix, width, columns, to);
    }

    static constexpr int ITEMS = CHUNK / PER_ITEM<cache>;
    const Attention &call;
    const long head_dim, sharing, head, first_row, num_rows, depth, key_size, slot_size;
    const char *const first_key;
    const int64_t *const slots;
    const bool is_tiled;
    Item<cache> *queries;
    float *sums;
    Packed<cache> packed;
    long chunk, num_shared = 0; /* where the chunk begins; keys that are context to some row */
    long contexts[MAX_TASK_ROWS], totals[MAX_TASK_ROWS], starts[MAX_TASK_ROWS];
    Running running[MAX_TASK_ROWS * MAX_SHARING];
    alignas(LINE) float scores[GROUP * CHUNK];
    alignas(LINE) Item<cache> weights[GROUP * ITEMS];
};

template <Cache cache>
void do_task(void *argument, long number) {
    Task<cache>(*static_cast<const Attention *>(argument), number).run();
}

}  // namespace

void attend(const Attention *call, long num_tasks, bool is_bf16, bool may_round, int num_threads) {
    void *argument = const_cast<Attention *>(call);
    const bool takes_pairs = may_round && MULTIPLIES_BF16 && call->head_dim % (2 * LANES) == 0;
    const auto task = !is_bf16 ? do_task<FLOATS> : takes_pairs ? do_task<BF16_PAIRS> : do_task<BF16S>;
    run_blocks(task, argument, num_tasks * call->num_kv_heads, num_threads);
}

extern "C" long attention_limit(int which) { return which == 0 ? (long)LANES : (long)MAX_SHARING; }

extern "C" void attention(const float *query, long query_head_stride, long query_row_stride, const void *cache,
                          long num_kv_heads, long num_heads, long head_dim,
                          const int64_t *path_slots, const int64_t *row_slots, const int64_t *row_contexts,
                          const int64_t *row_paths, const int64_t *row_path_lens, const int64_t *task_rows,
                          long num_tasks, float *output, const float *sinks, float scaling, float softcap,
                          long window, int is_bf16, int num_threads) {
    Attention call = {query, query_head_stride, query_row_stride, cache, num_kv_heads, num_heads, head_dim,
                      path_slots, row_slots, row_contexts, row_paths, row_path_lens, task_rows,
                      output, sinks, scaling, softcap, window};
    attend(&call, num_tasks, is_bf16, true, num_threads);
}
