// Chooses the pages of a context that a decode row's attention reads, as a ggml custom operation before it.
//
// The bounds of a page are Quest's (Tang et al. 2024): for each channel the least and the greatest key of the page.
// The greatest score that any key of it can have is then the sum of q * greatest where q > 0 and q * least elsewhere.
// Bounds depend on keys alone, never on a query: whoever shares the page's blocks shares them, and the blocks stay
// whole. They are kept by the page's last block (all that is before a block is the same wherever the block is used),
// computed when a page is first scored, and forgotten by whoever writes to the block (page_bounds.py).
//
// A K/V head reads the page that holds the sinks, the pages of the recent window, and of the others those that come
// nearest to the best page of any of its query heads. Sums have one order on every processor, so the choice does too.

#include <functional>

#include "tile.h"

namespace {

constexpr int64_t kRecentPages = 3;  // always read, with the first: the RECENT_PAGES of page_selection.py

template <class Element>
void bound(const Pass& pass, int64_t page, float* lowest) {
    float* const highest = lowest + pass.head_dim;
    for (int64_t tile = 0; tile < kPageKeys; tile += kKeys) {
        const Stored<Element> keys(pass, pass.layer->keys, locate(pass, page * kPageKeys + tile));
        for (int64_t d = 0; d < pass.head_dim; d += 8) {
            Eight low = tile ? load_eight(lowest + d) : keys.eight(0, d), high = tile ? load_eight(highest + d) : low;
            for (int t = 0; t < kKeys; t++) {
                const Eight key = keys.eight(t, d);
                low = lower(low, key);
                high = higher(high, key);
            }
            store_eight(lowest + d, low);
            store_eight(highest + d, high);
        }
    }
}

// The bounds of a page: head_dim least values, then head_dim greatest ones. Two threads may compute the same page for
// two sequences: they write equal values.
const float* bounds_of(const Pass& pass, int64_t page) {
    const Layer& layer = *pass.layer;
    const Step& step = *pass.step;
    const int64_t block = pass.table[((page + 1) * kPageKeys - 1) / step.block_tokens];
    float* const bounds = layer.bounds + (block * step.kv_heads + pass.kv_head) * 2 * pass.head_dim;
    uint8_t* const known = layer.known + block * layer.known_stride + pass.kv_head;
    if (__atomic_load_n(known, __ATOMIC_ACQUIRE)) return bounds;
    switch (step.kv_type) {  // ggml's numbers
        case 0: bound<Single>(pass, page, bounds); break;
        case 1: bound<Half>(pass, page, bounds); break;
        case 2: bound<FourBit>(pass, page, bounds); break;
        case 8: bound<EightBit>(pass, page, bounds); break;
        case 30: bound<BFloat>(pass, page, bounds); break;
    }
    __atomic_store_n(known, 1, __ATOMIC_RELEASE);
    return bounds;
}

// The bounds' scores of the pages [1, last) for the query at `query`, and the greatest of them.
float score(const Pass& pass, const float* query, int64_t last, float* scores) {
    float above[kMaxHeadDim], below[kMaxHeadDim], best = -INFINITY;
    for (int64_t d = 0; d < pass.head_dim; d++) above[d] = std::max(query[d], 0.f), below[d] = std::min(query[d], 0.f);
    for (int64_t page = 1; page < last; page++) {
        const float *const lowest = bounds_of(pass, page), *const highest = lowest + pass.head_dim;
        Eight sum{};
        for (int64_t d = 0; d < pass.head_dim; d += 8) {
            sum = fma(load_eight(below + d), load_eight(lowest + d), sum);
            sum = fma(load_eight(above + d), load_eight(highest + d), sum);
        }
        scores[page] = sum_of_lanes(sum);
        best = std::max(best, scores[page]);
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
