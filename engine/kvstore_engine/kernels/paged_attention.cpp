// Causal attention of query rows over a paged K/V cache, as a ggml custom operation.
//
// Online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022) over block tables (PagedAttention,
// Kwon et al. 2023), with long contexts cut into spans that threads share (Flash-Decoding, Dao et al. 2023). One work
// item is a run of queries of one sequence times one K/V head; the query heads that share this K/V head are rows of
// the same tile, so each key and value is loaded and widened once for all of them.
//
// A row's result has the same bits whatever else is in the step: in a prefill of 512 tokens, in a tail of 7, in a
// decode step, split or not, with any number of threads. Restoring a prefix rests on this. It holds because the order
// of each scalar's sums is fixed, and tied to absolute positions:
//   - a score is eight sums, one for each channel modulo 8, each over its channels in order, then added in order.
//     With few rows the lanes are the channels modulo 8; with many, K is turned and the lanes are keys.
//   - keys come in tiles of 32 and spans of 256 from position 0 on. A tile rescales the span's state, and adds its
//     weights by the same tree and its values key by key. A span's state does not depend on the spans before it;
//     states are merged in order. A key that a row may not see has weight 0 exactly and changes no bit.
// The same sources give the same bits with AVX2, AVX-512 and NEON: simd.h.

#include "tile_sums.h"

namespace {

// ---- spans -----------------------------------------------------------------------------------------------------

void load_queries(const Pass& pass) {
    const float scale = float(pass.layer->scale);
    for (int r = 0; r < pass.rows; r++) {
        const float* const query = pass.query + pass.offset(r);
        float* const target = pass.work.queries + r * pass.stride;
        for (int64_t d = 0; d < pass.head_dim; d++) target[d] = query[d] * scale;
    }
}

template <class Element>
void attend_tile(const Pass& pass, int64_t first_key, const TileRows& tile, const TileRows& next) {
    Workspace& work = pass.work;
    const Layer& layer = *pass.layer;
    // Few rows use each element once or twice: straight from the pool, if whole vectors of one head can be had there.
    const bool few = pass.rows < kManyRows, whole = Element::elements == 1 && pass.stride == pass.head_dim;
    prefetch(pass, layer.keys, next);
    if (!few)
        score_many(pass, widen<Element>(pass, layer.keys, tile, work.keys), tile.count);
    else if constexpr (Element::elements == 1)
        score_few(pass, Stored<Element>(pass, layer.keys, tile), tile.count);
    else
        score_few(pass, widen<Element>(pass, layer.keys, tile, work.keys), tile.count);
    softmax(pass, first_key);
    prefetch(pass, layer.values, next);
    if constexpr (Element::elements == 1)
        if (few && whole) return accumulate(pass, Stored<Element>(pass, layer.values, tile), tile.count);
    accumulate(pass, widen<Element>(pass, layer.values, tile, work.values), tile.count);
}

// The first tile from `first_key` on of which any row sees a key, or the end.
int64_t next_tile(const Pass& pass, int64_t first_key) {
    while (first_key < pass.end() && !pass.sees(first_key, first_key + kKeys)) first_key += kKeys;
    return first_key;
}

void prefetch_upcoming(const Layer* layer);

// The state of the keys [first_key, last_key) into work.{output,peak,total}.
template <class Element>
void attend_span(const Pass& pass, int64_t first_key, int64_t last_key) {
    Workspace& work = pass.work;
    std::memset(work.output, 0, sizeof(float) * pass.rows * pass.stride);
    std::fill_n(work.peak, pass.rows, kNothing);
    std::fill_n(work.total, pass.rows, 0.f);
    first_key = next_tile(pass, first_key);
    TileRows tile = locate(pass, first_key);
    while (first_key < last_key) {
        const int64_t after = next_tile(pass, first_key + kKeys);
        TileRows next;
        next.count = 0;
        if (after < pass.end()) next = locate(pass, after);
        if (after >= pass.end()) prefetch_upcoming(pass.layer);
        attend_tile<Element>(pass, first_key, tile, next);
        first_key = after;
        tile = next;
    }
}

void attend_span(const Pass& pass, int64_t span) {
    const int64_t first = span * kSpanKeys, last = std::min(first + kSpanKeys, pass.end());
    switch (pass.step->kv_type) {  // ggml's numbers
        case 0: return attend_span<Single>(pass, first, last);
        case 1: return attend_span<Half>(pass, first, last);
        case 2: return attend_span<FourBit>(pass, first, last);
        case 8: return attend_span<EightBit>(pass, first, last);
        case 30: return attend_span<BFloat>(pass, first, last);
    }
}

// The state of the spans before, in work.merged*, joined by another one's: `output`, `peak`, `total`.
void merge(const Pass& pass, const float* output, const float* peak, const float* total) {
    Workspace& work = pass.work;
    for (int r = 0; r < pass.rows; r++) {
        const float largest = std::max(work.merged_peak[r], peak[r]);
        const Floats before = exponential(splat(work.merged_peak[r] - largest));
        const Floats now = exponential(splat(peak[r] - largest));
        for (int64_t d = 0; d < pass.stride; d += kLanes) {
            float* const sum = work.merged + r * pass.stride + d;
            Floats other;
            std::memcpy(&other, output + r * pass.stride + d, sizeof other);
            store(sum, fma(load(sum), before, other * now));
        }
        work.merged_total[r] = fma(splat(work.merged_total[r]), before, splat(total[r]) * now)[0];
        work.merged_peak[r] = largest;
    }
}

void begin_merging(const Pass& pass) {
    std::memset(pass.work.merged, 0, sizeof(float) * pass.rows * pass.stride);
    std::fill_n(pass.work.merged_peak, pass.rows, kNothing);
    std::fill_n(pass.work.merged_total, pass.rows, 0.f);
}

void write_output(const Pass& pass) {
    for (int r = 0; r < pass.rows; r++) {
        const float* const sum = pass.work.merged + r * pass.stride;
        float* const target = pass.output + pass.offset(r);
        const float inverse = 1.f / pass.work.merged_total[r];
        for (int64_t d = 0; d < pass.head_dim; d++) target[d] = sum[d] * inverse;
    }
}

bool sees_span(const Pass& pass, int64_t span) { return pass.sees(span * kSpanKeys, (span + 1) * kSpanKeys); }

void attend_all(const Pass& pass) {
    load_queries(pass);
    begin_merging(pass);
    for (int64_t span = 0; span * kSpanKeys < pass.end(); span++)
        if (sees_span(pass, span)) {
            attend_span(pass, span);
            merge(pass, pass.work.output, pass.work.peak, pass.work.total);
        }
    write_output(pass);
}

// ---- spans that threads share ----------------------------------------------------------------------------------

// The record of a span of a pass: [rows][stride] output, [rows] peak, [rows] total.
float* record(const Pass& pass, const Item& item, int64_t span) {
    const int64_t rows = int64_t(item.queries) * pass.group;
    return pass.step->partials + (item.partial + span * rows + pass.first_row) * (pass.stride + kLanes);
}

void attend_part(const Pass& pass, const Item& item) {
    load_queries(pass);
    for (int64_t span = item.first_span; span < item.last_span; span++) {
        if (!sees_span(pass, span)) continue;
        attend_span(pass, span);
        float* const target = record(pass, item, span);
        std::memcpy(target, pass.work.output, sizeof(float) * pass.rows * pass.stride);
        std::memcpy(target + pass.rows * pass.stride, pass.work.peak, sizeof(float) * pass.rows);
        std::memcpy(target + pass.rows * (pass.stride + 1), pass.work.total, sizeof(float) * pass.rows);
    }
}

void merge_parts(const Pass& pass, const Item& item) {
    begin_merging(pass);
    for (int64_t span = 0; span < item.last_of_tile; span++) {
        if (!sees_span(pass, span)) continue;
        const float* const source = record(pass, item, span);
        merge(pass, source, source + pass.rows * pass.stride, source + pass.rows * (pass.stride + 1));
    }
    write_output(pass);
}

// ---- items -----------------------------------------------------------------------------------------------------

// The item that some thread takes next is likely ours: its first tile would have to be waited for.
void prefetch_upcoming(const Layer* layer) {
    const Step& step = *layer->step;
    const int64_t index = __atomic_load_n(&layer->next_item, __ATOMIC_RELAXED);
    if (index >= step.item_count) return;
    const Pass pass = pass_of(layer, step.items[index], 0, nullptr, nullptr);
    const int64_t first_key = next_tile(pass, step.items[index].first_span * kSpanKeys);
    if (first_key >= pass.end()) return;
    const TileRows tile = locate(pass, first_key);
    prefetch(pass, layer->keys, tile);
    prefetch(pass, layer->values, tile);
}

void run_item(const Layer* layer, const Item& item, const float* queries, float* output) {
    const int64_t rows = item.queries * (layer->step->query_heads / layer->step->kv_heads);
    const auto each_pass = [&](auto&& work) {
        for (int64_t first = 0; first < rows; first += kRows) work(pass_of(layer, item, first, queries, output));
    };
    if (!item.split) return each_pass([](const Pass& pass) { attend_all(pass); });
    each_pass([&](const Pass& pass) { attend_part(pass, item); });
    int32_t* const pending = layer->step->pending + item.tile;
    if (__atomic_add_fetch(pending, 1, __ATOMIC_ACQ_REL) < item.split) return;
    __atomic_store_n(pending, 0, __ATOMIC_RELAXED);  // for the next layer, which starts behind a barrier
    each_pass([&](const Pass& pass) { merge_parts(pass, item); });
}

}  // namespace

// ggml_custom_op_t. Source 0: rotated queries, f32 [tokens][query_heads][head_dim]; destination: the same shape.
extern "C" void KV_ATTENTION(const char* destination, int, int, void* userdata) {
    Layer* const layer = (Layer*)userdata;
    const Step* const step = layer->step;
    const char* const source = *(const char* const*)(destination + step->source_offset);
    const float* const queries = *(const float* const*)(source + step->data_offset);
    float* const output = *(float* const*)(destination + step->data_offset);
    // Items are handed out one by one: on a shared machine a thread that lost its core must not hold up the rest.
    for (;;) {
        const int64_t i = __atomic_fetch_add(&layer->next_item, 1, __ATOMIC_RELAXED);
        if (i >= step->item_count) return;
        run_item(layer, step->items[i], queries, output);
    }
}
