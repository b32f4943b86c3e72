// Paged attention for rows that each see a context in a paged cache: V1 in one pass, V2 in partitions and a merge.
//
// V1: a thread block for each row and part of a group of heads. V2: one for each partition of a row's keys as well; each
// leaves a normalised sum and the log2 of its weights' total, and kv_merge_partitions weighs them against each other.
// A row with no context gets zeros. Compiled for one shape: KV_QUERY and KV_CACHE (types of elements.h), KV_HEAD_DIM,
// KV_HEADS (query heads that share a read of K and V), KV_TILE (keys), KV_THREADS, KV_SHARED_BYTES.

#include "attend.h"

// attention.py's struct, field by field. All fields are 64 bits wide.
struct PagedAttention {
    const KV_QUERY::Stored* queries;    // [rows][query heads][head_dim]
    KV_QUERY::Stored* output;           // like queries
    const unsigned char *keys, *values; // planes of the pool, see cache_layout.h
    const int* sequences;               // [rows]: the row's line of `tables`
    const int* contexts;                // [rows]: tokens up to the row's own
    const int* tables;                  // [][table_stride]: block ids
    float* sums;                        // V2: [rows][query heads][partitions][head_dim]
    float* weights;                     // V2: [rows][query heads][partitions], log2
    long long table_stride, block_tokens, kv_heads, group;  // group: query heads of a K/V head
    long long window, sink_tokens;      // a row sees the last `window` keys (0: all) and the first `sink_tokens`
    long long partition_keys, partitions;  // V2
    double scale, softcap;              // of the scores; 0: no cap
};

typedef Attend<KV_QUERY, KV_CACHE, KV_HEAD_DIM, KV_HEADS, KV_TILE, KV_THREADS> Attention;
static_assert(Attention::kSharedBytes == KV_SHARED_BYTES, "variants.py computes the same");

namespace {

struct Work {
    int row, kv_head, first_head, heads;  // first_head: among all query heads
    Visible visible;
};

__device__ __forceinline__ Work work_of(const PagedAttention& call) {
    const int parts = static_cast<int>((call.group + KV_HEADS - 1) / KV_HEADS);
    const int row = blockIdx.x, kv_head = blockIdx.y / parts, part = blockIdx.y % parts;
    const int rest = static_cast<int>(call.group) - part * KV_HEADS;
    return {row, kv_head, kv_head * static_cast<int>(call.group) + part * KV_HEADS, rest < KV_HEADS ? rest : KV_HEADS,
            Visible::of(call.contexts[row], call.window, call.sink_tokens)};
}

__device__ __forceinline__ long long first_output(const PagedAttention& call, const Work& work) {
    return (work.row * call.kv_heads * call.group + work.first_head) * KV_HEAD_DIM;
}

__device__ __forceinline__ void attend(Attention& attention, unsigned char* shared, const PagedAttention& call,
                                       const Work& work, int first, int last) {
    attention.place(shared);
    attention.scale = static_cast<float>(call.scale);
    attention.softcap = static_cast<float>(call.softcap);
    attention.tiles.planes[0] = call.keys;
    attention.tiles.planes[1] = call.values;
    attention.tiles.table = call.tables + call.sequences[work.row] * call.table_stride;
    attention.tiles.layout = {static_cast<int>(call.block_tokens), static_cast<int>(call.kv_heads), work.kv_head};
    attention.tiles.visible = work.visible;
    attention.run(call.queries + first_output(call, work), work.heads, first, last);
}

}  // namespace

// Grid: rows, K/V heads times parts of their groups.
extern "C" __global__ void __launch_bounds__(KV_THREADS) kv_paged_attention_v1(const PagedAttention call) {
    KV_SHARED(shared);
    const Work work = work_of(call);
    KV_QUERY::Stored* const output = call.output + first_output(call, work);
    if (work.visible.count <= 0) {
        for (int i = threadIdx.x; i < work.heads * KV_HEAD_DIM; i += KV_THREADS) output[i] = KV_QUERY::narrow(0.f);
        return;
    }
    Attention attention;
    attend(attention, shared, call, work, 0, work.visible.count);
    for (int i = threadIdx.x; i < work.heads * KV_HEAD_DIM; i += KV_THREADS)
        output[i] = KV_QUERY::narrow(attention.merged(i) / attention.total[i / KV_HEAD_DIM]);
}

// Grid: rows, K/V heads times parts of their groups, partitions.
extern "C" __global__ void __launch_bounds__(KV_THREADS) kv_paged_attention_v2(const PagedAttention call) {
    KV_SHARED(shared);
    const Work work = work_of(call);
    const long long first = blockIdx.z * call.partition_keys, end = first + call.partition_keys;
    if (first >= work.visible.count) return;
    Attention attention;
    attend(attention, shared, call, work, static_cast<int>(first),
           end < work.visible.count ? static_cast<int>(end) : work.visible.count);
    const long long record = first_output(call, work) / KV_HEAD_DIM * call.partitions + blockIdx.z;
    for (int i = threadIdx.x; i < work.heads * KV_HEAD_DIM; i += KV_THREADS) {
        const int head = i / KV_HEAD_DIM;
        const long long at = record + head * call.partitions;
        call.sums[at * KV_HEAD_DIM + i % KV_HEAD_DIM] = attention.merged(i) / attention.total[head];
        if (i % KV_HEAD_DIM == 0) call.weights[at] = attention.top[head] + log2f(attention.total[head]);
    }
}

// Grid: rows, query heads.
extern "C" __global__ void __launch_bounds__(KV_THREADS) kv_merge_partitions(const PagedAttention call) {
    const Visible visible = Visible::of(call.contexts[blockIdx.x], call.window, call.sink_tokens);
    const int partitions = static_cast<int>((visible.count + call.partition_keys - 1) / call.partition_keys);
    const long long head = blockIdx.x * call.kv_heads * call.group + blockIdx.y;
    const float* const weights = call.weights + head * call.partitions;
    const float* const sums = call.sums + head * call.partitions * KV_HEAD_DIM;
    float greatest = minus_infinity();
    for (int i = 0; i < partitions; i++) greatest = fmaxf(greatest, weights[i]);
    for (int at = threadIdx.x; at < KV_HEAD_DIM; at += KV_THREADS) {
        float value = 0.f, total = 0.f;
        for (int i = 0; i < partitions; i++) {
            const float weight = exp2f(weights[i] - greatest);
            value += weight * sums[i * KV_HEAD_DIM + at];
            total += weight;
        }
        call.output[head * KV_HEAD_DIM + at] = KV_QUERY::narrow(total > 0.f ? value / total : 0.f);
    }
}
