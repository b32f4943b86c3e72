// Causal attention of query rows over a paged K/V cache, as a ggml custom operation.
//
// Online softmax (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022) over block tables (PagedAttention,
// Kwon et al. 2023). One work item is a run of queries of one sequence times one K/V head; the query heads that
// share this K/V head are rows of the same tile, so each key and value is loaded and widened once for all of them.
//
// Vector lanes are *rows*, never keys or channels. A row's sum is therefore always formed in the same order, one
// key after another in absolute position, whatever else is in the batch: the result for a token has the same bits
// in a prefill of 512 tokens, in a tail of 7 and in a decode step. Restoring a prefix rests on this. The price: a
// decode step without grouped heads leaves lanes idle.
//
// Compiled on the machine it runs on (see build.py), with GCC's vector extensions: 16 lanes wide with AVX-512, 8
// with AVX, 4 elsewhere. No -ffast-math: sums must not be reordered.

#include "layout.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

constexpr int kMaxHeadDim = 256;
constexpr int kKeys = 32;   // keys in a tile: amortises loading the running output
constexpr int kRows = 48;   // rows in a pass: six AVX vectors, three AVX-512 vectors

// ---- widening of stored elements -------------------------------------------------------------------------------

struct Half {
    static constexpr int bytes = 2;
    static void widen8(const char* source, float* target) {
#if defined(__F16C__)
        _mm256_storeu_ps(target, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
        const float16x8_t halves = vld1q_f16((const float16_t*)source);
        vst1q_f32(target, vcvt_f32_f16(vget_low_f16(halves)));
        vst1q_f32(target + 4, vcvt_f32_f16(vget_high_f16(halves)));
#else
        for (int i = 0; i < 8; i++) {
            uint16_t bits;
            std::memcpy(&bits, source + 2 * i, 2);
            const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
            float value = exponent ? std::ldexp(float(mantissa + 1024), exponent - 25) : std::ldexp(float(mantissa), -24);
            if (exponent == 31) value = mantissa ? NAN : INFINITY;
            target[i] = bits >> 15 ? -value : value;
        }
#endif
    }
};

struct Single {
    static constexpr int bytes = 4;
    static void widen8(const char* source, float* target) { std::memcpy(target, source, 32); }
};

// ---- vector arithmetic -----------------------------------------------------------------------------------------

inline Floats load(const float* p) { return *(const Floats*)p; }
inline void store(float* p, Floats x) { *(Floats*)p = x; }
inline Floats splat(float x) { return x - Floats{}; }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// exp(x) for x <= 0, Cephes' polynomial (2 ulp). Exactly 1 at 0 and exactly 0 below -87, so that a masked key
// changes neither sum nor output by a bit.
inline Floats exponential(Floats x) {
    const Floats clamped = maximum(x, splat(-87.f));
    const Ints power = __builtin_convertvector(clamped * 1.44269504f - 0.5f, Ints);
    const Floats n = __builtin_convertvector(power, Floats);
    const Floats r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const Floats value = p * r * r + r + 1.f;
    const Ints bits = (power + 127) << 23;
    return x >= splat(-87.f) ? value * (Floats)bits : Floats{};
}

// target[i][lane] = start[i][lane] * scale[lane] + sum over k of left[i * row + k * step] * right[k][lane], for
// i < Count. The 12 (or 8) accumulators stay in registers: this loop is where the time goes.
template <int Count, int Vectors, bool Accumulate>
inline void multiply(float* __restrict target, const float* __restrict left, int64_t row, int64_t step,
                     const float* __restrict right, int depth, const Floats* scale) {
    Floats sum[Count][Vectors];
    for (int i = 0; i < Count; i++)
        for (int v = 0; v < Vectors; v++)
            sum[i][v] = Accumulate ? load(target + (i * Vectors + v) * kLanes) * scale[v] : Floats{};
    for (int k = 0; k < depth; k++) {
        Floats lanes[Vectors];
        for (int v = 0; v < Vectors; v++) lanes[v] = load(right + (k * Vectors + v) * kLanes);
        for (int i = 0; i < Count; i++) {
            const Floats factor = splat(left[i * row + k * step]);
            for (int v = 0; v < Vectors; v++) sum[i][v] += factor * lanes[v];
        }
    }
    for (int i = 0; i < Count; i++)
        for (int v = 0; v < Vectors; v++) store(target + (i * Vectors + v) * kLanes, sum[i][v]);
}

// ---- one pass: up to kRows rows of one work item -----------------------------------------------------------------

struct alignas(64) Workspace {
    float keys[kKeys * kMaxHeadDim], values[kKeys * kMaxHeadDim];
    float queries[kRows * kMaxHeadDim], output[kRows * kMaxHeadDim];  // panel-major: [panel][channel][lane]
    float scores[kRows * kKeys];                                      // of one panel: [key][lane]
    float peak[kRows], total[kRows];
    int32_t limit[kRows];  // keys that a row may see
};
thread_local Workspace workspace;

struct Rows {
    const float* query;  // row r of the pass: query + offset(r)
    float* output;
    int64_t first_row;   // within the item: row = query index * group + head in group
    int count, group;
    int64_t token_stride, context_before;
    int64_t offset(int r, int head_dim) const {
        const int64_t row = first_row + r;
        return row / group * token_stride + row % group * head_dim;
    }
};

template <int Vectors>
void load_queries(const Rows& rows, int panels, int head_dim) {
    constexpr int width = Vectors * kLanes;
    const float scale = 1.f / std::sqrt(float(head_dim));
    for (int r = 0; r < panels * width; r++) {
        float* const panel = workspace.queries + r / width * width * head_dim + r % width;
        const float* const query = rows.query + rows.offset(std::min(r, rows.count - 1), head_dim);
        for (int d = 0; d < head_dim; d++) panel[d * width] = query[d] * scale;
        const int64_t row = rows.first_row + std::min(r, rows.count - 1);
        workspace.limit[r] = int32_t(rows.context_before + row / rows.group + 1);
        workspace.peak[r] = -INFINITY;
        workspace.total[r] = 0;
    }
    std::memset(workspace.output, 0, sizeof(float) * panels * width * head_dim);
}

// Turns workspace.scores into probabilities relative to the new running maximum; `rescale` is what the old sums
// must be multiplied with.
template <int Vectors>
inline void softmax(int panel, int64_t first_key, int keys, bool masked, Floats* rescale) {
    constexpr int width = Vectors * kLanes;
    for (int v = 0; v < Vectors; v++) {
        float* const scores = workspace.scores + v * kLanes;
        const int lane = panel * width + v * kLanes;
        const Floats before = load(workspace.peak + lane);
        Floats peak = before, total{};
        if (masked) {
            const Ints limit = *(const Ints*)(workspace.limit + lane) - int32_t(first_key);
            for (int t = 0; t < keys; t++)
                store(scores + t * width, limit > t ? load(scores + t * width) : splat(-INFINITY));
        }
        for (int t = 0; t < keys; t++) peak = maximum(peak, load(scores + t * width));
        for (int t = 0; t < keys; t++) {
            const Floats weight = exponential(load(scores + t * width) - peak);
            store(scores + t * width, weight);
            total += weight;
        }
        rescale[v] = exponential(before - peak);
        store(workspace.peak + lane, peak);
        store(workspace.total + lane, load(workspace.total + lane) * rescale[v] + total);
    }
}

template <int HeadDim, int Vectors, class Element>
void attend(const Layer* layer, const Step* step, const Rows& rows, const int32_t* table, int kv_head) {
    constexpr int width = Vectors * kLanes, count = Vectors == 1 ? 8 : 4;
    const int head_dim = HeadDim ? HeadDim : int(step->head_dim), panels = (rows.count + width - 1) / width;
    const int64_t end = rows.context_before + (rows.first_row + rows.count - 1) / rows.group + 1;
    const int64_t head_offset = int64_t(kv_head) * head_dim * Element::bytes;
    load_queries<Vectors>(rows, panels, head_dim);
    for (int64_t first_key = 0; first_key < end; first_key += kKeys) {
        const int keys = int(std::min<int64_t>(kKeys, end - first_key));
        for (int t = 0; t < keys; t++) {  // rows past `end` may hold anything, NaN included: never read
            const int64_t position = first_key + t;
            const int64_t slot = table[position / step->block_tokens] * step->block_tokens + position % step->block_tokens;
            const char* const key = (const char*)layer->keys + slot * step->row_bytes + head_offset;
            const char* const value = (const char*)layer->values + slot * step->row_bytes + head_offset;
            for (int d = 0; d < head_dim; d += 8) {
                Element::widen8(key + d * Element::bytes, workspace.keys + t * head_dim + d);
                Element::widen8(value + d * Element::bytes, workspace.values + t * head_dim + d);
            }
        }
        for (int panel = 0; panel < panels; panel++) {
            const int last = std::min((panel + 1) * width, panels * width) - 1;
            if (workspace.limit[last] <= first_key) continue;
            const bool masked = workspace.limit[panel * width] < first_key + keys;
            float* const output = workspace.output + panel * width * head_dim;
            const float* const queries = workspace.queries + panel * width * head_dim;
            Floats rescale[Vectors];
            for (int t = 0; t < keys; t += count)
                multiply<count, Vectors, false>(workspace.scores + t * width, workspace.keys + t * head_dim, head_dim,
                                                1, queries, head_dim, nullptr);
            softmax<Vectors>(panel, first_key, keys, masked, rescale);
            for (int d = 0; d < head_dim; d += count)
                multiply<count, Vectors, true>(output + d * width, workspace.values + d, 1, head_dim,
                                               workspace.scores, keys, rescale);
        }
    }
    for (int r = 0; r < rows.count; r++) {
        const float* const panel = workspace.output + r / width * width * head_dim + r % width;
        float* const target = rows.output + rows.offset(r, head_dim);
        const float inverse = 1.f / workspace.total[r];
        for (int d = 0; d < head_dim; d++) target[d] = panel[d * width] * inverse;
    }
}

template <int HeadDim, class Element>
void run_item(const Layer* layer, const Step* step, const int32_t* item, const float* queries, float* output) {
    const int32_t* const sequence = step->sequences + 4 * item[0];
    const int32_t* const table = step->tables + item[0] * step->table_stride;
    const int group = int(step->query_heads / step->kv_heads);
    const int64_t token_stride = step->query_heads * step->head_dim;
    const int64_t start = (sequence[0] + item[2]) * token_stride + int64_t(item[1]) * group * step->head_dim;
    const int64_t context_before = sequence[2] - sequence[1] + item[2], total = int64_t(item[3]) * group;
    for (int64_t first = 0; first < total; first += kRows) {
        const int count = int(std::min<int64_t>(kRows, total - first));
        const Rows rows{queries + start, output + start, first, count, group, token_stride, context_before};
        if (count <= kLanes)
            attend<HeadDim, 1, Element>(layer, step, rows, table, item[1]);
        else
            attend<HeadDim, 3, Element>(layer, step, rows, table, item[1]);
    }
}

template <int HeadDim, class Element>
void run(Layer* layer, const Step* step, const float* queries, float* output) {
    // Items are handed out one by one: on a shared machine a thread that lost its core must not hold up the rest.
    for (;;) {
        const int64_t i = __atomic_fetch_add(&layer->next_item, 1, __ATOMIC_RELAXED);
        if (i >= step->item_count) return;
        run_item<HeadDim, Element>(layer, step, step->items + 4 * i, queries, output);
    }
}

template <class Element>
void dispatch(Layer* layer, const Step* step, const float* queries, float* output) {
    switch (step->head_dim) {
        case 64: return run<64, Element>(layer, step, queries, output);
        case 128: return run<128, Element>(layer, step, queries, output);
        default: return run<0, Element>(layer, step, queries, output);
    }
}

}  // namespace

// ggml_custom_op_t. Source 0: rotated queries, f32 [tokens][query_heads][head_dim]; destination: the same shape.
extern "C" void kv_paged_attention(const char* destination, int, int, void* userdata) {
    Layer* const layer = (Layer*)userdata;
    const Step* const step = layer->step;
    const char* const source = *(const char* const*)(destination + step->source_offset);
    const float* const queries = *(const float* const*)(source + step->data_offset);
    float* const output = *(float* const*)(destination + step->data_offset);
    if (step->element_bytes == 2)
        dispatch<Half>(layer, step, queries, output);
    else
        dispatch<Single>(layer, step, queries, output);
}
