// What a work item computes at a time: some rows of queries of one sequence, and one K/V head.
//
// Owns the constants of the algorithm and each thread's workspace.
#pragma once

#include "layout.h"
#include "simd.h"

namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kKeys = 32;      // keys in a tile
constexpr int kRows = 48;      // rows in a pass: the workspace then fits a first-level cache of 48 KiB
constexpr int kManyRows = 8;   // from here on it pays to turn K
constexpr float kNothing = -1e30f;  // the peak of no scores: finite, so that differences are
constexpr int kTileVectors = kKeys / kLanes;

struct alignas(64) Workspace {
    float keys[kKeys * kMaxHeadDim], values[kKeys * kMaxHeadDim], turned[kKeys * kMaxHeadDim];
    float queries[kRows * kMaxHeadDim];
    float output[kRows * kMaxHeadDim], merged[kRows * kMaxHeadDim];  // a span's sum, and that of the spans before it
    float scores[kRows * kKeys], rescale[kRows];
    float peak[kRows], total[kRows], merged_peak[kRows], merged_total[kRows];
};
thread_local Workspace this_threads;

// A pass's part of the workspace. Passes over the same keys keep their queries, sums and peaks one behind another; all
// else they use in turns.
struct Work {
    float *keys, *values, *turned, *queries, *output, *merged, *scores, *rescale, *peak, *total, *merged_peak, *merged_total;

    Work() = default;
    Work(Workspace& all, int64_t row, int64_t stride)
        : keys(all.keys), values(all.values), turned(all.turned), queries(all.queries + row * stride),
          output(all.output + row * stride), merged(all.merged + row * stride), scores(all.scores),
          rescale(all.rescale), peak(all.peak + row), total(all.total + row), merged_peak(all.merged_peak + row),
          merged_total(all.merged_total + row) {}
};
alignas(64) const float kZeros[kMaxHeadDim + 32] = {};  // a row that no query sees, in any format

// One pass: up to kRows rows of one work item.
struct Pass {
    Work work;
    const Layer* layer;
    const Step* step;
    const int32_t* table;
    const uint8_t* chosen;   // of each page: are its keys read? null: all are
    int64_t kv_head;
    const float* query;      // row r of the item: query + offset(r)
    float* output;
    int64_t first_row;       // within the item: row = query index * group + head in group
    int64_t rows, group;
    int64_t context_before;  // keys before the item's first query
    int64_t head_dim, stride;  // stride: head_dim rounded up to whole vectors, the length of a row in the workspace

    int64_t position(int64_t row) const { return context_before + (first_row + row) / group; }
    int64_t offset(int64_t row) const {
        return (first_row + row) / group * step->query_heads * head_dim + (first_row + row) % group * head_dim;
    }
    // The first key outside the sinks that `row` sees.
    int64_t window_start(int64_t row) const {
        return layer->window ? std::max<int64_t>(0, position(row) + 1 - layer->window) : 0;
    }
    int64_t end() const { return position(rows - 1) + 1; }
    // Whether any row sees any key of [first, last).
    bool sees(int64_t first, int64_t last) const {
        if (first >= end() || (last <= window_start(0) && first >= layer->sink_tokens)) return false;
        if (!chosen) return true;
        for (int64_t page = first / kPageKeys; page * kPageKeys < std::min(last, end()); page++)
            if (chosen[page]) return true;
        return false;
    }
};

// The pass of `item` for its K/V head number `place` that begins with row `first_row`.
inline Pass pass_of(const Layer* layer, const Item& item, int place, int64_t first_row, const float* queries,
                    float* output) {
    const Step& step = *layer->step;
    const int32_t* const sequence = step.sequences + 4 * item.sequence;
    const int64_t group = step.query_heads / step.kv_heads, kv_head = item.kv_head + place;
    const int64_t head = (sequence[0] + item.first_query) * step.query_heads + kv_head * group;
    Pass pass;
    pass.layer = layer;
    pass.step = &step;
    pass.table = step.tables + item.sequence * step.table_stride;
    pass.chosen = nullptr;
    if (layer->bounds && sequence[3])
        pass.chosen = step.chosen + (item.sequence * step.kv_heads + kv_head) * step.page_stride;
    pass.kv_head = kv_head;
    pass.query = queries + head * step.head_dim;
    pass.output = output + head * step.head_dim;
    pass.first_row = first_row;
    pass.rows = std::min<int64_t>(kRows, item.queries * group - first_row);
    pass.group = group;
    pass.context_before = sequence[2] - sequence[1] + item.first_query;
    pass.head_dim = step.head_dim;
    pass.stride = (step.head_dim + kLanes - 1) / kLanes * kLanes;
    pass.work = Work(this_threads, place * pass.rows, pass.stride);
    return pass;
}

// The passes of an item's K/V heads that begin with row `first_row`. They see the same keys.
struct Passes {
    int count;
    Pass list[kRows];

    Passes(const Layer* layer, const Item& item, int64_t first_row, const float* queries, float* output)
        : count(item.kv_heads) {
        for (int i = 0; i < count; i++) list[i] = pass_of(layer, item, i, first_row, queries, output);
    }
    const Pass* begin() const { return list; }
    const Pass* end() const { return list + count; }
};

}  // namespace
