// Chooses the pages of a context that a decode row's attention reads, as a ggml custom operation before it.
//
// The bounds are Quest's (Tang et al. 2024), of each block of the pool: for each channel the least and the greatest key.
// The greatest score that any key of the block can have is then the sum of q * greatest where q > 0 and q * least
// elsewhere; a page has the greatest of its blocks. Bounds depend on keys alone, never on a query: whoever shares a
// block shares them, and blocks stay whole. They are computed when a block is first scored, rounded outwards to
// bfloat16, and forgotten by whoever writes to the block (page_bounds.py).
//
// A K/V head reads the page that holds the sinks, the pages of the recent window, and of the others those that come
// nearest to the best page of any of its query heads. Sums have one order on every processor, so the choice does too.

#include <functional>

#include "tile.h"

namespace {

constexpr int64_t kRecentPages = 192 / kPageKeys;  // always read, as is the first: RECENT_PAGES of page_selection.py
constexpr float kMost = 1e38f;

// `value` as a bfloat16 that is not greater (`up`: not less).
uint16_t outwards(float value, bool up) {
    if (value != value) value = up ? INFINITY : -INFINITY;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const bool grows = (bits & 0xFFFF) && bool(bits >> 31) != up;
    return uint16_t((bits >> 16) + grows);
}

template <class Element>
void bound(const Pass& pass, int64_t block, uint16_t* least) {
    const int64_t tokens = pass.step->block_tokens;
    float low[kMaxHeadDim], high[kMaxHeadDim];
    for (int64_t first = 0; first < tokens; first += kKeys) {
        const Stored<Element> keys(pass, pass.layer->keys, locate(pass, block * tokens + first));
        const int count = int(std::min<int64_t>(kKeys, tokens - first));
        for (int64_t d = 0; d < pass.head_dim; d += 8) {
            Eight lowest = first ? load_eight(low + d) : keys.eight(0, d);
            Eight highest = first ? load_eight(high + d) : lowest;
            for (int t = 0; t < count; t++) {
                const Eight key = keys.eight(t, d);
                lowest = lower(lowest, key);
                highest = higher(highest, key);
            }
            store_eight(low + d, lowest);
            store_eight(high + d, highest);
        }
    }
    uint16_t* const greatest = least + pass.head_dim;
    for (int64_t d = 0; d < pass.head_dim; d++) {
        least[d] = outwards(low[d], false);
        greatest[d] = outwards(high[d], true);
    }
}

// The bounds of a block of the context: head_dim least values, then head_dim greatest ones. Two threads may compute
// those of a block that two sequences share: they write equal values.
const char* bounds_of(const Pass& pass, int64_t block) {
    const Layer& layer = *pass.layer;
    const Step& step = *pass.step;
    const int64_t place = pass.table[block];
    uint16_t* const bounds = layer.bounds + (place * step.kv_heads + pass.kv_head) * 2 * pass.head_dim;
    uint8_t* const known = layer.known + place * layer.known_stride + pass.kv_head;
    if (__atomic_load_n(known, __ATOMIC_ACQUIRE)) return (const char*)bounds;
    switch (step.kv_type) {  // ggml's numbers
        case 0: bound<Single>(pass, block, bounds); break;
        case 1: bound<Half>(pass, block, bounds); break;
        case 2: bound<FourBit>(pass, block, bounds); break;
        case 8: bound<EightBit>(pass, block, bounds); break;
        case 30: bound<BFloat>(pass, block, bounds); break;
    }
    __atomic_store_n(known, 1, __ATOMIC_RELEASE);
    return (const char*)bounds;
}

// What the bounds allow in the pages [1, last) for the query at `query`, and the greatest of these scores.
float score(const Pass& pass, const float* query, int64_t last, float* scores) {
    const int64_t page_blocks = kPageKeys / pass.step->block_tokens, end = last * page_blocks;
    float above[kMaxHeadDim], below[kMaxHeadDim], best = -kMost;
    for (int64_t d = 0; d < pass.head_dim; d++) above[d] = std::max(query[d], 0.f), below[d] = std::min(query[d], 0.f);
    std::fill(scores + 1, scores + last, -kMost);
    for (int64_t first = page_blocks; first < end; first += 8) {
        Eight sums[8] = {};
        const int count = int(std::min<int64_t>(8, end - first));
        for (int i = 0; i < count; i++) {
            const char *const least = bounds_of(pass, first + i), *const greatest = least + 2 * pass.head_dim;
            for (int64_t d = 0; d < pass.head_dim; d += 8) {
                sums[i] = fma(load_eight(below + d), BFloat::widen(least, d), sums[i]);
                sums[i] = fma(load_eight(above + d), BFloat::widen(greatest, d), sums[i]);
            }
        }
        alignas(64) float allowed[8];
        store_eight(allowed, sums_of_lanes(sums));
        for (int i = 0; i < count; i++) {  // numbers, whatever K holds: the sort below needs an order
            float& page = scores[(first + i) / page_blocks];
            page = std::max(page, allowed[i] == allowed[i] ? std::clamp(allowed[i], -kMost, kMost) : kMost);
            best = std::max(best, page);
        }
    }
    return best;
}

// Marks `count` of the pages [1, last): those with the greatest scores, of equal ones the first.
void mark(uint8_t* chosen, const float* scores, float* sorted, int64_t last, int64_t count) {
    std::copy(scores + 1, scores + last, sorted);
    std::nth_element(sorted, sorted + count - 1, sorted + last - 1, std::greater<float>());
    const float least = sorted[count - 1];
    int64_t equal = count - std::count_if(scores + 1, scores + last, [&](float each) { return each > least; });
    for (int64_t page = 1; page < last; page++)
        chosen[page] = scores[page] > least || (scores[page] == least && equal-- > 0);
}

void choose(const Pass& pass, int32_t sequence, int64_t wanted) {
    const Step& step = *pass.step;
    const int64_t pages = (pass.end() + kPageKeys - 1) / kPageKeys, last = pages - kRecentPages;
    uint8_t* const chosen = step.chosen + (sequence * step.kv_heads + pass.kv_head) * step.page_stride;
    float* const scores = step.page_scores + (sequence * step.kv_heads + pass.kv_head) * 2 * step.page_stride;
    float* const others = scores + step.page_stride;
    std::fill_n(chosen, pages, uint8_t(1));
    if (wanted >= pages) return;
    for (int64_t head = 0; head < pass.group; head++) {
        float* const target = head ? others : scores;
        const float best = score(pass, pass.query + head * pass.head_dim, last, target);
        for (int64_t page = 1; page < last; page++) {
            target[page] -= best;
            scores[page] = std::max(scores[page], target[page]);
        }
    }
    mark(chosen, scores, others, last, wanted - 1 - kRecentPages);
}

}  // namespace

// ggml_custom_op_t. Source 0: rotated queries, f32 [tokens][query_heads][head_dim]; nothing is written to the destination.
extern "C" void KV_CHOICE(const char* destination, int, int, void* userdata) {
    Layer* const layer = (Layer*)userdata;
    const Step* const step = layer->step;
    const char* const source = *(const char* const*)(destination + step->source_offset);
    const float* const queries = *(const float* const*)(source + step->data_offset);
    for (;;) {
        const int64_t i = __atomic_fetch_add(&layer->next_choice, 1, __ATOMIC_RELAXED);
        if (i >= step->sequence_count * step->kv_heads) return;
        const int32_t sequence = int32_t(i / step->kv_heads), wanted = step->sequences[4 * sequence + 3];
        if (!wanted) continue;
        const Item item{sequence, int32_t(i % step->kv_heads), 0, 1};
        Pass pass = pass_of(layer, item, 0, queries, nullptr);
        pass.chosen = nullptr;  // it is what is being made
        choose(pass, sequence, wanted);
    }
}
