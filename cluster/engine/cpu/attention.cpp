/* Tree attention over paged keys and values, read where they lie.
 *
 * A row sees the first `context` tokens of its sequence and then the nodes of its own path; in that
 * order, a token's place among them is its absolute position.  Keys are taken in chunks whose
 * borders are absolute positions, and every sum runs in an order that depends on positions alone.
 * So a row's result depends on its own prefix and on nothing else, to the bit: not on the batch, nor
 * on whether a token is committed context or a node of a tree.
 *
 * The softmax is computed chunk by chunk with a running maximum (Milakov and Gimelshein 2018).
 */
#include "operations.h"
#include "pool.h"
#include "vectors.h"

enum { CHUNK = 64, MAX_TASK_ROWS = 16, MAX_SHARING = 16 };
/* Of a head whose queries are rounded. */
enum { MAX_PAIRS = 128 };

namespace {

/* Floats; bfloat16; bfloat16 whose keys the processor multiplies itself, by queries rounded to it. */
enum Cache { FLOATS, BF16S, BF16_PAIRS };
/* Keys and values of one head that a vector of 32-bit lanes takes in. */
template <Cache cache>
constexpr long STEP = cache == BF16_PAIRS ? 2 * LANES : LANES;
template <Cache cache>
constexpr long SIZE = cache == FLOATS ? 4 : 2;

template <Cache cache>
INLINE vfloat load(const void *from, long index) {
    if constexpr (cache == FLOATS) return *(const vfloat *)(static_cast<const float *>(from) + index);
    else return load_bf16(static_cast<const uint16_t *>(from) + index);
}

/* Sums of neighbouring lanes of `a`, then of `b`. */
INLINE vfloat add_neighbours(vfloat a, vfloat b) {
#if defined(__clang__)
    vfloat result = {};
    for (int i = 0; i < LANES / 2; i++) {
        result[i] = a[2 * i] + a[2 * i + 1];
        result[LANES / 2 + i] = b[2 * i] + b[2 * i + 1];
    }
    return result;
#else
    vint even = {};
    for (int i = 0; i < LANES; i++) even[i] = 2 * i;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
#endif
}

/* The sum of each of LANES vectors; always neighbours first, then pairs of them, and so on. */
INLINE vfloat sums_of(vfloat (&each)[LANES]) {
#pragma GCC unroll 5
    for (int left = LANES / 2; left > 0; left /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < left; i++) each[i] = add_neighbours(each[2 * i], each[2 * i + 1]);
    return each[0];
}

/* A vector of the query, pairs of bfloat16 if the keys are taken as such, times a key from `d` on. */
template <Cache cache>
INLINE vfloat add_product(vfloat sums, const float *query, const void *key, long d) {
    if constexpr (cache == BF16_PAIRS)
        return add_products(sums, *(const vuint *)query, *(const vuint *)(static_cast<const uint16_t *>(key) + d));
    else
        return sums + *(const vfloat *)query * load<cache>(key, d);
}

/* scores[h][j] = q k for the LANES keys from `first` on and `num_heads` heads; each in one and the same
 * order.  query: `head_stride` from head to head. */
template <Cache cache, int num_heads>
INLINE void score(float (*scores)[CHUNK], const float *query, long head_stride, const void *const *keys, int first,
                  long head_dim) {
    constexpr int KEYS = LANES / num_heads;
    for (int j = first; j < first + LANES; j += KEYS) {
        vfloat each[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) each[i] = vfloat{};
        for (long d = 0; d < head_dim; d += STEP<cache>)
#pragma GCC unroll 16
            for (int k = 0; k < KEYS; k++)
#pragma GCC unroll 4
                for (int h = 0; h < num_heads; h++)
                    each[h * KEYS + k] = add_product<cache>(each[h * KEYS + k],
                                                            query + h * head_stride + d * LANES / STEP<cache>, keys[j + k], d);
        alignas(64) float sums[LANES];
        *(vfloat *)sums = sums_of(each);
#pragma GCC unroll 4
        for (int h = 0; h < num_heads; h++) memcpy(scores[h] + j, sums + h * KEYS, KEYS * sizeof(float));
    }
}

/* output[heads][head_dim] += probabilities[heads][j] * value of key j, in ascending order of j. */
template <Cache cache, int num_heads>
INLINE void add_values(float *output, const float (*probabilities)[CHUNK], const void *const *keys,
                       long value_offset, int start, int stop, long head_dim) {
    for (long d = 0; d < head_dim; d += 2 * LANES) {
        const bool has_both = d + LANES < head_dim;
        vfloat sums[num_heads][2];
#pragma GCC unroll 4
        for (int h = 0; h < num_heads; h++) {
            sums[h][0] = *(const vfloat *)(output + h * head_dim + d);
            sums[h][1] = has_both ? *(const vfloat *)(output + h * head_dim + d + LANES) : vfloat{};
        }
        for (int j = start; j < stop; j++) {
            const vfloat first = load<cache>(keys[j], value_offset + d);
            const vfloat second = has_both ? load<cache>(keys[j], value_offset + d + LANES) : vfloat{};
#pragma GCC unroll 4
            for (int h = 0; h < num_heads; h++) {
                const vfloat weight = splat(probabilities[h][j]);
                sums[h][0] += weight * first;
                sums[h][1] += weight * second;
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < num_heads; h++) {
            *(vfloat *)(output + h * head_dim + d) = sums[h][0];
            if (has_both) *(vfloat *)(output + h * head_dim + d + LANES) = sums[h][1];
        }
    }
}

/* What the running softmax of one row and head has come to. */
struct Running {
    float maximum, sum;
};

/* Runs function.run<n>(h) for all heads, as many at a time as registers hold. */
template <typename Function>
INLINE void for_heads(int sharing, const Function &function) {
    int h = 0;
    for (; h + 4 <= sharing; h += 4) function.template run<4>(h);
    for (; h + 2 <= sharing; h += 2) function.template run<2>(h);
    if (h < sharing) function.template run<1>(h);
}

template <Cache cache>
struct Scoring {
    float (*scores)[CHUNK];
    const float *query;
    long head_stride;
    const void *const *keys;
    int start, stop;
    long head_dim;
    template <int num_heads>
    INLINE_MEMBER void run(int h) const {
        for (int j = start / LANES * LANES; j < stop; j += LANES)
            score<cache, num_heads>(scores + h, query + h * head_stride, head_stride, keys, j, head_dim);
    }
};

template <Cache cache>
struct Summing {
    float *output;
    const float (*probabilities)[CHUNK];
    const void *const *keys;
    long value_offset;
    int start, stop;
    long head_dim;
    template <int num_heads>
    INLINE_MEMBER void run(int h) const {
        add_values<cache, num_heads>(output + h * head_dim, probabilities + h, keys, value_offset, start, stop, head_dim);
    }
};

/* The keys of one chunk, of which `start` to `stop` are seen, enter one row's heads. */
template <Cache cache>
INLINE void enter_chunk(const Attention &call, const float *query, long head_stride, float *output, Running *running,
                        const void *const *keys, int start, int stop, int sharing) {
    const long head_dim = call.head_dim, value_offset = call.num_kv_heads * head_dim;
    alignas(64) float scores[MAX_SHARING][CHUNK];
    for_heads(sharing, Scoring<cache>{scores, query, head_stride, keys, start, stop, head_dim});
    for (int h = 0; h < sharing; h++) {
        float *own = scores[h];
        vfloat highest = splat(-INFINITY);
        for (int j = start / LANES * LANES; j < stop; j += LANES) {
            vfloat score = *(const vfloat *)(own + j) * splat(call.scaling);
            if (call.softcap > 0)
                for (int i = 0; i < LANES; i++) score[i] = call.softcap * std::tanh(score[i] / call.softcap);
            vint place = {};
            for (int i = 0; i < LANES; i++) place[i] = j + i;
            score = (place >= start) & (place < stop) ? score : splat(-INFINITY);
            *(vfloat *)(own + j) = score;
            highest = score > highest ? score : highest;
        }
        float maximum = running[h].maximum;
        for (int i = 0; i < LANES; i++) maximum = highest[i] > maximum ? highest[i] : maximum;
        vfloat sum = {};
        for (int j = start / LANES * LANES; j < stop; j += LANES) {
            vint place = {};
            for (int i = 0; i < LANES; i++) place[i] = j + i;
            const vfloat score = *(const vfloat *)(own + j);
            const vfloat power = (place >= start) & (place < stop) ? exp_of(score - splat(maximum)) : vfloat{};
            *(vfloat *)(own + j) = power;
            sum += power;
        }
        if (maximum > running[h].maximum) {
            const float shrunk = running[h].maximum == -INFINITY ? 0.0f : exp_of(running[h].maximum - maximum);
            running[h].sum *= shrunk;
            for (long d = 0; d < head_dim; d += LANES) *(vfloat *)(output + h * head_dim + d) *= splat(shrunk);
            running[h].maximum = maximum;
        }
        running[h].sum += sum_of(sum);
    }
    for_heads(sharing, Summing<cache>{output, scores, keys, value_offset, start, stop, head_dim});
}

/* Ask for `size` bytes. */
INLINE void fetch(const char *from, long size) {
    for (long i = 0; i < size; i += 64) __builtin_prefetch(from + i);
}

/* One task: up to MAX_TASK_ROWS neighbouring rows of one sequence, and one head of the keys. */
template <Cache cache>
void do_task(void *argument, long number) {
    const Attention &call = *static_cast<const Attention *>(argument);
    const long task = number / call.num_kv_heads, kv_head = number % call.num_kv_heads;
    const long first_row = call.task_rows[task], num_rows = call.task_rows[task + 1] - first_row;
    const long head_dim = call.head_dim, sharing = call.num_heads / call.num_kv_heads;
    const long key_size = head_dim * SIZE<cache>, slot_size = 2 * call.num_kv_heads * key_size;
    const char *first_key = static_cast<const char *>(call.cache) + kv_head * key_size;
    const long head = kv_head * sharing;
    const int64_t *slots = reinterpret_cast<const int64_t *>(call.row_slots[first_row]);

    Running running[MAX_TASK_ROWS][MAX_SHARING];
    long totals[MAX_TASK_ROWS], starts[MAX_TASK_ROWS], end = 0, begin = INT64_MAX;
    long most_shared = 0; /* keys that are context to some row */
    for (long r = 0; r < num_rows; r++) {
        totals[r] = call.row_contexts[first_row + r] + call.row_path_lens[first_row + r];
        starts[r] = call.window > 0 && totals[r] > call.window ? totals[r] - call.window : 0;
        end = totals[r] > end ? totals[r] : end;
        most_shared = call.row_contexts[first_row + r] > most_shared ? call.row_contexts[first_row + r] : most_shared;
        begin = starts[r] < begin ? starts[r] : begin;
        for (long h = 0; h < sharing; h++) running[r][h] = {-INFINITY, 0.0f};
        memset(call.output + ((first_row + r) * call.num_heads + head) * head_dim, 0, sharing * head_dim * 4);
    }
    for (long chunk = begin / CHUNK * CHUNK; chunk < end; chunk += CHUNK) {
        const void *shared[CHUNK];
        const long left = most_shared - chunk, num_shared = left > CHUNK ? CHUNK : left;
        for (long j = 0; j < num_shared; j++) {
            shared[j] = first_key + slots[chunk + j] * slot_size;
            fetch(static_cast<const char *>(shared[j]) + slot_size / 2, key_size); /* its value */
        }
        for (long j = chunk + CHUNK; j < chunk + 2 * CHUNK && j < most_shared; j++)
            fetch(first_key + slots[j] * slot_size, key_size);
        for (long r = 0; r < num_rows; r++) {
            const long row = first_row + r;
            if (totals[r] <= chunk || starts[r] >= chunk + CHUNK) continue;
            const int start = starts[r] > chunk ? (int)(starts[r] - chunk) : 0;
            const int stop = totals[r] < chunk + CHUNK ? (int)(totals[r] - chunk) : CHUNK;
            const void *const *keys = shared;
            const void *own[CHUNK];
            if (call.row_contexts[row] < chunk + CHUNK) { /* the context ends here: nodes, then padding */
                const int64_t *path = call.path_slots + call.row_paths[row] - call.row_contexts[row];
                for (int j = 0; j < CHUNK; j++) {
                    const long position = chunk + j;
                    own[j] = position < call.row_contexts[row] ? shared[j]
                             : position < totals[r]            ? first_key + path[position] * slot_size
                                                               : own[j - 1];
                }
                keys = own;
            }
            const float *query = call.query + head * call.query_head_stride + row * call.query_row_stride;
            long head_stride = call.query_head_stride;
            alignas(64) uint32_t rounded[MAX_SHARING * MAX_PAIRS];
            if constexpr (cache == BF16_PAIRS) {
                for (long h = 0; h < sharing; h++)
                    round_to_bf16(query + h * head_stride, reinterpret_cast<uint16_t *>(rounded + h * MAX_PAIRS), head_dim);
                query = reinterpret_cast<const float *>(rounded);
                head_stride = MAX_PAIRS;
            }
            enter_chunk<cache>(call, query, head_stride, call.output + (row * call.num_heads + head) * head_dim, running[r],
                               keys, start, stop, (int)sharing);
        }
    }
    for (long r = 0; r < num_rows; r++)
        for (long h = 0; h < sharing; h++) {
            float *output = call.output + ((first_row + r) * call.num_heads + head + h) * head_dim;
            float sum = running[r][h].sum, factor = 1.0f;
            if (call.sinks) { /* one more logit, without a value */
                const float sink = call.sinks[head + h], most = fmaxf(sink, running[r][h].maximum);
                factor = exp_of(running[r][h].maximum - most);
                sum = sum * factor + exp_of(sink - most);
            }
            for (long d = 0; d < head_dim; d += LANES) *(vfloat *)(output + d) *= splat(factor / sum);
        }
}

}  // namespace

void attend(const Attention *call, long num_tasks, int is_bf16, int num_threads) {
    void *argument = const_cast<Attention *>(call);
    const bool takes_pairs = MULTIPLIES_BF16 && call->head_dim % (2 * LANES) == 0 && call->head_dim <= 2 * MAX_PAIRS;
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
    attend(&call, num_tasks, is_bf16, num_threads);
}
