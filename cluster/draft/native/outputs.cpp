/* Suffix drafts: what followed the end of a text in it and in earlier outputs. */
#include <algorithm>
#include <cmath>
#include <memory>

#include "lookups.h"

namespace {

/* They stand on two shelves; when the newer one is full, the older one is cleared and takes its place.  So forgetting
 * costs nothing. */
class Outputs : public Source {
  public:
    Outputs(const int64_t *sizes, int64_t count, int64_t half, int64_t max_matches)
        : sizes(sizes, sizes + count), half(half), max_matches(max_matches) {
        shelves.push_back(std::make_unique<IndexedText>(this->sizes.data(), count));
    }

    void keep(const int32_t *tokens, int64_t count) {
        const int64_t cut = std::max<int64_t>(count + 1 - half, 0);
        if (cut >= count) return;
        if ((int64_t)shelves[0]->tokens.size() + count - cut + 1 > half) {
            shelves.insert(shelves.begin(), std::make_unique<IndexedText>(sizes.data(), (int64_t)sizes.size()));
            shelves.resize(2);
        }
        shelves[0]->append(tokens + cut, count - cut);
        shelves[0]->append(&SEPARATOR, 1);
    }

    int64_t size() const override {
        int64_t total = 0;
        for (const auto &shelf : shelves) total += (int64_t)shelf->tokens.size();
        return total;
    }

    /* The newest places of the text's end: those of the longer n-gram where there are any, otherwise those of the
     * shorter one; in the text itself, and apart from it in outputs.  A token less of agreement halves a place's
     * weight. */
    Walk &walk(const Text &text, int64_t) override {
        const IndexedText &own = text.indexed;
        const int64_t end = (int64_t)own.tokens.size();
        found.begin();
        agreements.clear();
        for (const Grams &grams : own.grams)
            if (end >= grams.size && add(own, grams, grams.previous[end - 1], own)) break;
        for (size_t which = 0; which < sizes.size(); which++) {
            if (end < sizes[which]) continue;
            const uint64_t key = own.key(end, shelves[0]->grams[which]);
            bool is_there = false;
            for (const auto &shelf : shelves)
                is_there |= add(*shelf, shelf->grams[which], shelf->grams[which].newest(key), own);
            if (is_there) break;
        }
        const int64_t longest = agreements.empty() ? 0 : *std::max_element(agreements.begin(), agreements.end());
        for (size_t i = 0; i < agreements.size(); i++) found.weigh(i, std::ldexp(1.0, (int)(agreements[i] - longest)));
        found.end(longest);
        return found;
    }

  private:
    /* The places of a chain and how many tokens before each of them end the text `own`. */
    bool add(const IndexedText &text, const Grams &grams, int32_t last, const IndexedText &own) {
        const int64_t length = (int64_t)own.tokens.size();
        const bool is_there = last >= 0;
        for (int64_t i = 0; last >= 0 && i < max_matches; i++, last = grams.previous[last]) {
            const int32_t *next = text.tokens.data() + last + 1;
            agreements.push_back(agreement(own.tokens.data() + length, length, next, last + 1));
            found.add(Place{text.tokens.data(), (int64_t)text.tokens.size(), last + 1, 0.0});
        }
        return is_there;
    }

    const std::vector<int64_t> sizes;
    const int64_t half, max_matches;
    std::vector<std::unique_ptr<IndexedText>> shelves; /* the newest first */
    PlaceWalk found;
    std::vector<int64_t> agreements; /* of each place */
};

}  // namespace

extern "C" {

Source *open_outputs(const int64_t *sizes, int64_t count, int64_t half, int64_t max_matches) {
    return new Outputs(sizes, count, half, max_matches);
}

void keep_output(Source *outputs, const int32_t *tokens, int64_t count) {
    static_cast<Outputs *>(outputs)->keep(tokens, count);
}
}
