/* Texts, what drafters look up in them, and the trees that grow from it.
 *
 * `cluster.draft.native.lookups` says what the numbers mean that Python passes.
 */
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

/* Where the n-grams of one size stand in one text: chains, newest place first. */
class Grams {
  public:
    explicit Grams(int64_t size);
    const int64_t size;
    uint64_t power; /* of the multiplier of prefix hashes */
    /* The n-gram with this key ends at the text's next token, whose index is previous.size(). */
    void append(uint64_t key, bool is_whole);
    /* Forget the last token; key: of the n-gram that ends there. */
    void pop(uint64_t key, bool is_whole);
    /* The newest last token of an n-gram, -1 = none. */
    int32_t newest(uint64_t key) const;
    std::vector<int32_t> previous; /* last token of an n-gram -> of the same n-gram before, -1 = none */

  private:
    struct Entry {
        uint64_t key;
        int32_t place; /* -1 = none now, -2 = never used */
    };
    Entry *find(uint64_t key);
    void grow();
    std::vector<Entry> table;
    size_t num_used = 0;
};

/* Tokens, and where their n-grams stand.  Grams are sorted by size, the longest first. */
struct IndexedText {
    IndexedText(const int64_t *sizes, int64_t count);
    void append(const int32_t *added, int64_t count);
    void truncate(int64_t length);
    /* Of the n-gram of this size that ends before `end`; size <= end. */
    uint64_t key(int64_t end, const Grams &grams) const { return hashes[end] - hashes[end - grams.size] * grams.power; }
    std::vector<int32_t> tokens;
    std::vector<uint64_t> hashes; /* poly64 of every prefix, as in token_log.py */
    std::vector<Grams> grams;
};

/* How the target draws, as far as a look-up looks at it. */
struct Law {
    uint64_t seed = 0;
    int64_t stream = 0, max_tokens = 0, min_tokens = 0;
    double divisor = 0.0; /* temperature, 0 = greedy */
    std::vector<int32_t> stops;
    bool is_useful(int64_t position, int32_t token) const;
};

/* How often matches were right; owned by Python: hits[33], then trials[33]. */
struct Rates {
    double *values;
    double of(int64_t evidence) const;
    void record(int64_t evidence, bool is_hit) const;
};

/* The newest tree of a text.  Entry 0 of starts and evidence is the root, entry n + 1 node n. */
struct Grown {
    std::vector<int32_t> tokens, parents;
    std::vector<float> survivals;
    std::vector<int64_t> evidence;
    std::vector<int64_t> starts; /* where the tokens that were known there begin */
    std::vector<int32_t> known;
    void clear();
    void learn(const int32_t *committed, int64_t count, Rates rates) const;
};

struct Text {
    Text(const int64_t *sizes, int64_t count) : indexed(sizes, count) {}
    IndexedText indexed;
    Law law;
    Grown grown;
    int64_t num_cuts = 0; /* how often tokens were taken back */
};

/* What followed a context. */
struct Found {
    int64_t evidence;
    double trust; /* how far noise decides among them, see grow.cpp */
    std::vector<int32_t> tokens, contexts; /* contexts: behind each token, as numbers of the walk's own */
    std::vector<double> counts;
};

/* What followed the end of one text, and then what followed that. */
class Walk {
  public:
    virtual ~Walk() = default;
    /* context: 0 = the end of the text.  path: drafted tokens up to it.  False where nothing is known. */
    virtual bool look_up(int64_t context, const std::vector<int32_t> &path, Found &found) = 0;
};

/* Where something that agrees with the end of a text goes on. */
struct Place {
    const int32_t *tokens;
    int64_t length, index;
    double weight;
};

/* From places that agree with the end of a text. */
class PlaceWalk : public Walk {
  public:
    void begin();
    void add(const Place &place) { places.push_back(place); }
    void weigh(size_t place, double weight) { places[place].weight = weight; }
    /* No more places follow.  match_len: tokens on which the best of them agrees. */
    void end(int64_t match_len);
    bool look_up(int64_t context, const std::vector<int32_t> &path, Found &found) override;

  private:
    struct Group {
        size_t begin, end;
        int64_t match_len;
    };
    std::vector<Place> places;
    std::vector<Group> groups;
    std::vector<int32_t> group_of;
};

/* What drafters look up; of one kind per drafter. */
class Source {
  public:
    virtual ~Source() = default;
    /* The walk from the end of a text, valid until the next call. */
    virtual Walk &walk(const Text &text, int64_t position) = 0;
    /* How much it holds, in its own measure. */
    virtual int64_t size() const = 0;
};

const int32_t SEPARATOR = -1;     /* ends what places point into; no token is negative */
const int64_t LONGEST_MATCH = 32; /* evidence beyond it teaches nothing; as in lookups.py */

/* How many of the `count` tokens before `end` are those before `other`, of which there are `before`. */
inline int64_t agreement(const int32_t *end, int64_t count, const int32_t *other, int64_t before) {
    const int64_t reach = std::min({LONGEST_MATCH, count, before});
    int64_t length = 0;
    while (length < reach && end[-1 - length] == other[-1 - length]) length++;
    return length;
}

/* The shared noise of one token; Philox4x32-10, as in noise.py. */
double gumbel(uint64_t seed, int64_t position, int32_t token, int64_t stream);

void grow_tree(Text &text, Walk &walk, Rates rates, int64_t position, int64_t max_nodes, double min_survival);
