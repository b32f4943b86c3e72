// Chooses the pages of a context that a decode row's attention reads, as a ggml custom operation before it.
//
// The bounds are Quest's (Tang et al. 2024): for each channel the least and the greatest key. The greatest score that any
// key of a page can have is then the sum of q * greatest where q > 0 and q * least elsewhere. Bounds are kept for each
// block of the pool; those of a page span its blocks. (The greatest of its blocks' own scores is a closer bound, but
// lost answers of benchmarks/selection.py.) Bounds depend on keys alone, never on a query: whoever shares a
// block shares them, and blocks stay whole. They are computed when a block is first scored, rounded outwards to
// bfloat16, and forgotten by whoever writes to the block (page_bounds.py).
//
// A K/V head reads the page that holds the sinks, the pages of the recent window, and of the others those to which its
// query heads would give the most attention if every page had one key, at its bound: the softmax of each head, summed.
// A head that prefers no page then has no say. Sums have one order in every build, so builds choose alike.

#include <cmath>
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

// Writes to `scores` what the bounds allow in the pages [1, last) for `query`. Returns the greatest.
float score(const Pass& pass, const float* query, int64_t last, float* scores) {
    const int64_t page_blocks = kPageKeys / pass.step->block_tokens;
    float above[kMaxHeadDim], below[kMaxHeadDim], best = -kMost;
    for (int64_t d = 0; d < pass.head_dim; d++) above[d] = std::max(query[d], 0.f), below[d] = std::min(query[d], 0.f);
    for (int64_t first = 1; first < last; first += 8) {
        Eight sums[8] = {};
        const int count = int(std::min<int64_t>(8, last - first));
        for (int i = 0; i < count; i++) {
            const char* blocks[kPageKeys];
            for (int64_t b = 0; b < page_blocks; b++) blocks[b] = bounds_of(pass, (first + i) * page_blocks + b);
            for (int64_t d = 0; d < pass.head_dim; d += 8) {
                Eight least = BFloat::widen(blocks[0], d), greatest = BFloat::widen(blocks[0], pass.head_dim + d);
                for (int64_t b = 1; b < page_blocks; b++) {
                    least = lower(least, BFloat::widen(blocks[b], d));
                    greatest = higher(greatest, BFloat::widen(blocks[b], pass.head_dim + d));
                }
                sums[i] = fma(load_eight(below + d), least, sums[i]);
                sums[i] = fma(load_eight(above + d), greatest, sums[i]);
            }
        }
        alignas(64) float allowed[8];
        store_eight(allowed, sums_of_lanes(sums));
        for (int i = 0; i < count; i++) {  // numbers, whatever K holds: the sort below needs an order
            scores[first + i] = allowed[i] == allowed[i] ? std::clamp(allowed[i], -kMost, kMost) : kMost;
            best = std::max(best, scores[first + i]);
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
    std::fill(scores + 1, scores + last, 0.f);
    for (int64_t head = 0; head < pass.group; head++) {
        const float best = score(pass, pass.query + head * pass.head_dim, last, others), scale = float(pass.layer->scale);
        float total = 0;
        for (int64_t page = 1; page < last; page++)
            total += others[page] = std::exp((others[page] - best) * scale);
        for (int64_t page = 1; page < last; page++) scores[page] += others[page] / total;
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
        Pass pass = pass_of(layer, item, 0, 0, queries, nullptr);
        pass.chosen = nullptr;  // it is what is being made
        choose(pass, sequence, wanted);
    }
}
