/* Who may win a draw: argmax over the vocabulary of scaled logits plus Gumbel noise, up to near-ties.
 *
 * The noise is `cluster.spec.noise`'s: Philox4x32-10 integers (Salmon et al. 2011), exactly, and their
 * transform -log(-log1p(-U)) to a few units in the last place of a float, which is enough to tell all
 * candidates but those within `margin` of the best.  These are returned; where there are several, the
 * caller compares them exactly.
 */
#include <algorithm>
#include <cfloat>
#include <utility>
#include <vector>

#include "operations.h"
#include "pool.h"
#include "vectors.h"

enum { PAIR = LANES / 2 };
/* Of a Gumbel variable whose U is at least 2^-33. */
constexpr float MOST_NOISE = 23.0f;
typedef uint64_t vlong __attribute__((vector_size(PAIR * 8), aligned(8), may_alias));
typedef float vpair __attribute__((vector_size(PAIR * 4), aligned(4), may_alias));
typedef uint32_t vword __attribute__((vector_size(PAIR * 4), aligned(4), may_alias));

namespace {

struct Row {
    const float *logits;
    double temperature; /* 0 = greedy */
    uint64_t seed, position, stream;
    const uint32_t *allowed; /* null = all */
};

struct Draw {
    const Row *rows;
    long vocab_size;
    float margin;
    long limit;
    int32_t *token_ids;
    int64_t *finalists, *counts;
};

/* The products of the lower 32 bits of each lane. */
INLINE vlong multiply(vlong a, uint32_t b) {
#if defined(HAS_ZMM)
    return (vlong)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(HAS_YMM) && defined(__AVX2__)
    return (vlong)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
    return (a & (uint64_t)0xffffffffu) * (uint64_t)b;
#endif
}

/* The first output word of Philox4x32-10 with the counter (token, position, stream, 0), in each lane's lower half. */
INLINE vlong philox(vlong token, uint64_t position, uint64_t stream, uint64_t seed) {
    vlong c0 = token, c1 = vlong{} + position, c2 = vlong{} + stream, c3 = {};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        const vlong p0 = multiply(c0, 0xD2511F53u), p1 = multiply(c2, 0xCD9E8D57u);
        c0 = (p1 >> 32) ^ c1 ^ (uint64_t)k0;
        c2 = (p0 >> 32) ^ c3 ^ (uint64_t)k1;
        c1 = p1;
        c3 = p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

/* The words of LANES tokens from `token` on. */
INLINE vuint words_from(uint64_t token, const Row &row) {
    vlong count = {};
    for (int i = 0; i < PAIR; i++) count[i] = i;
    alignas(64) uint32_t words[LANES];
    for (int half = 0; half < 2; half++) {
        const vlong word = philox(count + (token + half * PAIR), row.position, row.stream, row.seed);
        *(vword *)(words + half * PAIR) = __builtin_convertvector(word, vword);
    }
    return *(const vuint *)words;
}

/* log x for positive normal x, to about 2 units in the last place (after Cephes' logf). */
INLINE vfloat log_of(vfloat x) {
    const vuint bits = (vuint)x;
    vint exponent = (vint)(bits >> 23) - 126;
    vfloat part = (vfloat)((bits & 0x007fffffu) | 0x3f000000u); /* in [0.5, 1) */
    const vint is_low = part < splat(0.70710678f);
    exponent += is_low; /* -1 where true */
    part = part - splat(1.0f) + (vfloat)((vint)part & is_low);
    const vfloat square = part * part;
    vfloat sum = splat(7.0376836292e-2f);
    sum = fma_of(sum, part, splat(-1.1514610310e-1f));
    sum = fma_of(sum, part, splat(1.1676998740e-1f));
    sum = fma_of(sum, part, splat(-1.2420140846e-1f));
    sum = fma_of(sum, part, splat(1.4249322787e-1f));
    sum = fma_of(sum, part, splat(-1.6668057665e-1f));
    sum = fma_of(sum, part, splat(2.0000714765e-1f));
    sum = fma_of(sum, part, splat(-2.4999993993e-1f));
    sum = fma_of(sum, part, splat(3.3333331174e-1f));
    const vfloat whole = __builtin_convertvector(exponent, vfloat);
    sum = fma_of(whole, splat(-2.12194440e-4f), sum * part * square);
    sum = fma_of(square, splat(-0.5f), sum);
    return fma_of(whole, splat(0.693359375f), part + sum);
}

/* -log(-log1p(-U)), U = (word + 0.5) / 2^32. */
INLINE vfloat gumbel_of(vuint words) {
    const vfloat half = splat(0.5f), unit = splat(2.3283064365386963e-10f);
    /* A float holds 24 bits: what is near 1 is told from the other end. */
    const vfloat u = (__builtin_convertvector(words, vfloat) + half) * unit;
    const vfloat v = (__builtin_convertvector(~words, vfloat) + half) * unit; /* 1 - U */
    const vfloat rest = splat(1.0f) - u;
    const vfloat lost = splat(1.0f) - rest; /* u as far as `rest` has it; corrects the logarithm */
    const vfloat small = lost == splat(0.0f) ? u : -log_of(rest) * (u / (lost == splat(0.0f) ? u : lost));
    const vfloat energy = u < half ? small : -log_of(v);
    return -log_of(energy);
}

/* The first of the greatest logits, -1 where that is not finite or one is no number. */
long greatest(const float *logits, long size, float *maximum) {
    vfloat greatest = splat(-INFINITY);
    vint is_none = {};
    long token = 0;
    for (; token + LANES <= size; token += LANES) {
        const vfloat each = *(const vfloat *)(logits + token);
        is_none |= each != each;
        greatest = each > greatest ? each : greatest;
    }
    float best = -INFINITY;
    bool has_none = false;
    for (int i = 0; i < LANES; i++) {
        best = greatest[i] > best ? greatest[i] : best;
        has_none |= is_none[i] != 0;
    }
    for (; token < size; token++) {
        best = logits[token] > best ? logits[token] : best;
        has_none |= logits[token] != logits[token];
    }
    *maximum = best;
    if (has_none || !std::isfinite(best)) return -1;
    for (token = 0; logits[token] != best;) token++;
    return token;
}

/* The row's logits, -inf at the tokens that its mask forbids; valid until this thread's next call. */
const float *allowed_logits(const Row &row, long size) {
    if (row.allowed == nullptr) return row.logits;
    thread_local std::vector<float> masked;
    masked.assign(size, -INFINITY);
    for (long start = 0; start < size; start += 32)
        for (uint32_t bits = row.allowed[start / 32]; bits != 0; bits &= bits - 1) {
            const long token = start + __builtin_ctz(bits);
            if (token < size) masked[token] = row.logits[token];
        }
    return masked.data();
}

void do_row(void *argument, long index) {
    const Draw &draw = *static_cast<const Draw *>(argument);
    const Row &row = draw.rows[index];
    const long size = draw.vocab_size;
    const float *all = allowed_logits(row, size);
    float maximum;
    const long top = greatest(all, size, &maximum);
    draw.token_ids[index] = (int32_t)top;
    draw.counts[index] = top < 0 ? 0 : 1;
    if (top < 0 || row.temperature == 0.0) return;
    /* As a float neither zero nor infinite; see `cluster.spec.sampling.single_precision`. */
    const float temperature = (float)std::clamp(row.temperature, (double)FLT_MIN, (double)FLT_MAX);
    const float unit = 2.3283064365386963e-10f;
    /* No token far below the winner is worth its noise: the greatest logit's score is a first bound. */
    float best = gumbel_of(words_from(top, row))[0];
    thread_local std::vector<std::pair<int64_t, float>> candidates;
    candidates.clear();
    for (long start = 0; start < size; start += LANES) {
        vfloat logits = splat(-INFINITY);
        if (size - start >= LANES)
            logits = *(const vfloat *)(all + start);
        else
            for (long i = 0; i < size - start; i++) logits[i] = all[start + i];
        const vfloat scaled = (logits - splat(maximum)) / splat(temperature);
        const float least = best - draw.margin;
        if (!any_of(scaled > splat(least - MOST_NOISE))) continue;
        const vuint words = words_from(start, row);
        /* -log1p(-U) is at least U, so the noise is at most -log U; a word is U to 24 bits. */
        if (!any_of(__builtin_convertvector(words, vfloat) * splat(0.999f * unit) < exp_of(scaled - splat(least)))) continue;
        const vfloat scores = scaled + gumbel_of(words);
        for (int i = 0; i < LANES; i++)
            if (scores[i] >= least) {
                candidates.push_back({start + i, scores[i]});
                best = scores[i] > best ? scores[i] : best;
            }
    }
    long found = 0;
    int64_t *finalists = draw.finalists + index * draw.limit;
    for (const auto &[token, score] : candidates)
        if (score >= best - draw.margin) {
            if (found < draw.limit) finalists[found] = token;
            found++;
        }
    draw.token_ids[index] = (int32_t)finalists[0];
    draw.counts[index] = found;
}

}  // namespace

/* Each row's token, -1 where its logits have no finite maximum.  shares: of the rows, in turn.
 *
 * Returns the greatest of counts [rows]: 0 where there is no token, 1 where it is the winner; more where
 * so many come into question, `finalists` [rows, limit] in ascending order, all of them unless there are
 * more than `limit`. */
extern "C" int64_t draw_tokens(const DrawShare *shares, long num_shares, long vocab_size, float margin, long limit,
                               int32_t *token_ids, int64_t *finalists, int64_t *counts, int num_threads) {
    std::vector<Row> rows;
    std::vector<uint64_t> depths;
    for (const DrawShare *share = shares; share < shares + num_shares; share++) {
        depths.assign(share->num_rows, 0);
        for (int64_t row = 0; row < share->num_rows; row++) {
            /* Row 0 is the context's, row n + 1 node n's; a node's parent stands before it, -1 = the context. */
            if (row > 0) depths[row] = depths[share->parents[row - 1] + 1] + 1;
            rows.push_back({share->logits + row * vocab_size, share->temperature, share->seed,
                            (uint64_t)share->position + depths[row], (uint64_t)share->stream,
                            share->allowed == nullptr ? nullptr : share->allowed + row * ((vocab_size + 31) / 32)});
        }
    }
    Draw draw = {rows.data(), vocab_size, margin, limit, token_ids, finalists, counts};
    run_blocks(do_row, &draw, (long)rows.size(), num_threads);
    int64_t most = 0;
    for (size_t row = 0; row < rows.size(); row++) most = counts[row] > most ? counts[row] : most;
    return most;
}

/* Noise of single tokens, [rows, width]; seeds, positions, streams: [rows].  width <= 2^31. */
extern "C" void gumbel_tokens(const uint64_t *seeds, const int64_t *positions, const int64_t *streams,
                              const int64_t *tokens, long num_rows, long width, float *noise) {
    for (long row = 0; row < num_rows; row++, tokens += width, noise += width)
        for (long start = 0; start < width; start += LANES) {
            const long present = width - start < LANES ? width - start : LANES;
            alignas(64) uint32_t words[LANES] = {};
            for (int half = 0; half < 2; half++) {
                vlong token = {};
                for (long i = 0; i < PAIR && half * PAIR + i < present; i++)
                    token[i] = (uint64_t)tokens[start + half * PAIR + i] & 0xffffffffu;
                const vlong word = philox(token, (uint64_t)positions[row], (uint64_t)streams[row], seeds[row]);
                *(vword *)(words + half * PAIR) = __builtin_convertvector(word, vword);
            }
            const vfloat values = gumbel_of(*(const vuint *)words);
            for (long i = 0; i < present; i++) noise[start + i] = values[i];
        }
}
