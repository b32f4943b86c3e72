// Causal attention of query rows over a paged K/V cache, as a ggml custom operation.
//
// Online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022) over block tables (PagedAttention,
// Kwon et al. 2023), with long contexts cut into spans that threads share (Flash-Decoding, Dao et al. 2023). One work
// item is a run of queries of one sequence times one or some K/V heads; the query heads that share a K/V head are rows
// of the same tile, so each key and value is loaded and widened once for all of them.
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
void attend_tile(const Pass& pass, int64_t first_key, const TileRows& tile) {
    const Work& work = pass.work;
    const Layer& layer = *pass.layer;
    // Few rows use each element once or twice: straight from the pool, if whole vectors of one head can be had there.
    const bool few = pass.rows < kManyRows, whole = Element::elements == 1 && pass.stride == pass.head_dim;
    if (!few)
        score_many(pass, widen<Element>(pass, layer.keys, tile, work.keys), tile.count);
    else if constexpr (Element::elements == 1)
        score_few(pass, Stored<Element>(pass, layer.keys, tile), tile.count);
    else
        score_few(pass, widen<Element>(pass, layer.keys, tile, work.keys), tile.count);
    softmax(pass, first_key);
    if constexpr (Element::elements == 1)
        if (few && whole) return accumulate(pass, Stored<Element>(pass, layer.values, tile), tile.count);
    accumulate(pass, widen<Element>(pass, layer.values, tile, work.values), tile.count);
}

// The first tile from `first_key` on of which any row sees a key, or the end.
int64_t next_tile(const Pass& pass, int64_t first_key) {
    while (first_key < pass.end() && !pass.sees(first_key, first_key + kKeys)) first_key += kKeys;
    return first_key;
}

// The state of the keys [first_key, last_key) into work.{output,peak,total}.
template <class Element>
void attend_span(const Passes& passes, int64_t first_key, int64_t last_key) {
    for (const Pass& pass : passes) {
        std::memset(pass.work.output, 0, sizeof(float) * pass.rows * pass.stride);
        std::fill_n(pass.work.peak, pass.rows, kNothing);
        std::fill_n(pass.work.total, pass.rows, 0.f);
    }
    const Pass& any = passes.list[0];
    for (; (first_key = next_tile(any, first_key)) < last_key; first_key += kKeys) {
        const TileRows tile = locate(any, first_key);
        read_through(any, any.layer->keys, tile, passes.count);
        read_through(any, any.layer->values, tile, passes.count);
        for (const Pass& pass : passes) attend_tile<Element>(pass, first_key, tile);
    }
}

void attend_span(const Passes& passes, int64_t span) {
    const int64_t first = span * kSpanKeys, last = std::min(first + kSpanKeys, passes.list[0].end());
    switch (passes.list[0].step->kv_type) {  // ggml's numbers
        case 0: return attend_span<Single>(passes, first, last);
        case 1: return attend_span<Half>(passes, first, last);
        case 2: return attend_span<FourBit>(passes, first, last);
        case 8: return attend_span<EightBit>(passes, first, last);
        case 30: return attend_span<BFloat>(passes, first, last);
    }
}

// The state of the spans before, in work.merged*, joined by another one's: `output`, `peak`, `total`.
void merge(const Pass& pass, const float* output, const float* peak, const float* total) {
    const Work& work = pass.work;
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

void attend_all(const Passes& passes) {
    for (const Pass& pass : passes) load_queries(pass), begin_merging(pass);
    const Pass& any = passes.list[0];
    for (int64_t span = 0; span * kSpanKeys < any.end(); span++) {
        if (!sees_span(any, span)) continue;
        attend_span(passes, span);
        for (const Pass& pass : passes) merge(pass, pass.work.output, pass.work.peak, pass.work.total);
    }
    for (const Pass& pass : passes) write_output(pass);
}

// ---- spans that threads share ----------------------------------------------------------------------------------

// The record of a span of a pass: [rows][stride] output, [rows] peak, [rows] total.
float* record(const Pass& pass, const Item& item, int64_t span) {
    const int64_t rows = int64_t(item.queries) * pass.group, before = span * item.kv_heads + pass.kv_head - item.kv_head;
    return pass.step->partials + (item.partial + before * rows + pass.first_row) * (pass.stride + kLanes);
}

void attend_part(const Passes& passes, const Item& item) {
    for (const Pass& pass : passes) load_queries(pass);
    for (int64_t span = item.first_span; span < item.last_span; span++) {
        if (!sees_span(passes.list[0], span)) continue;
        attend_span(passes, span);
        for (const Pass& pass : passes) {
            float* const target = record(pass, item, span);
            std::memcpy(target, pass.work.output, sizeof(float) * pass.rows * pass.stride);
            std::memcpy(target + pass.rows * pass.stride, pass.work.peak, sizeof(float) * pass.rows);
            std::memcpy(target + pass.rows * (pass.stride + 1), pass.work.total, sizeof(float) * pass.rows);
        }
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

void run_item(const Layer* layer, const Item& item, const float* queries, float* output) {
    const int64_t rows = item.queries * (layer->step->query_heads / layer->step->kv_heads);
    const auto each = [&](auto&& work) {
        for (int64_t first = 0; first < rows; first += kRows) work(Passes(layer, item, first, queries, output));
    };
    if (!item.split) return each([](const Passes& passes) { attend_all(passes); });
    each([&](const Passes& passes) { attend_part(passes, item); });
    int32_t* const pending = layer->step->pending + item.tile;
    if (__atomic_add_fetch(pending, 1, __ATOMIC_ACQ_REL) < item.split) return;
    __atomic_store_n(pending, 0, __ATOMIC_RELAXED);  // for the next layer, which starts behind a barrier
    each([&](const Passes& passes) {
        for (const Pass& pass : passes) merge_parts(pass, item);
    });
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
