// Rotates the queries and keys of new tokens and writes keys and values into the paged cache, quantised if it is.
//
// A warp for each head of each row; a head's values stay in registers from the load to the store. Compiled for one
// shape: KV_QUERY (of queries, keys and values), KV_CACHE, KV_HEAD_DIM, KV_THREADS.

#include "cache_layout.h"

// rope.py's struct, field by field. All fields are 64 bits wide.
struct RopeCache {
    const KV_QUERY::Stored *queries, *keys, *values;  // [rows][stride], of which the heads are the first elements
    KV_QUERY::Stored* rotated;          // [rows][query_heads][head_dim]; may be `queries`
    unsigned char *key_plane, *value_plane;  // see cache_layout.h
    const int* positions;               // [rows]
    const int* slots;                   // [rows]: block * block_tokens + place in the block; negative: not stored
    const float* turns;                 // [positions][rotary / 2][2]: cosine and sine
    long long rows, query_heads, kv_heads, block_tokens;
    long long query_stride, key_stride, value_stride;  // in elements
    long long rotary;                   // leading dimensions that are rotated; even
    long long interleaved;              // pairs are (2i, 2i + 1), else (i, i + rotary / 2)
};

namespace {

constexpr int kPairs = (KV_HEAD_DIM / 2 + kWarp - 1) / kWarp;  // of a lane

// The two dimensions of pair `pair`; those past the rotated ones are neighbours.
__device__ __forceinline__ int2 dimensions(int pair, int rotary, bool interleaved) {
    if (interleaved || pair >= rotary / 2) return make_int2(2 * pair, 2 * pair + 1);
    return make_int2(pair, pair + rotary / 2);
}

__device__ __forceinline__ void store(unsigned char* plane, const CacheLayout<KV_CACHE, KV_HEAD_DIM>& layout, int slot,
                                      int rotary, bool interleaved, const float values[kPairs][2]) {
    const int lane = threadIdx.x % kWarp;
    const int block = slot / layout.block_tokens, place = slot % layout.block_tokens;
    float by = 1.f;
    if constexpr (KV_CACHE::kScaled) {
        float greatest = 0.f;
#pragma unroll
        for (int i = 0; i < kPairs; i++) greatest = fmaxf(greatest, fmaxf(fabsf(values[i][0]), fabsf(values[i][1])));
        greatest = warp_max(greatest);
        const bool is_zero = greatest < 1e-34f;  // whose inverse would overflow
        by = is_zero ? 0.f : KV_CACHE::kGreatest / greatest;
        if (lane == 0)
            *reinterpret_cast<float*>(plane + layout.scale(block, place)) =
                is_zero ? 0.f : greatest / KV_CACHE::kGreatest;
    }
    KV_CACHE::Stored* const row = reinterpret_cast<KV_CACHE::Stored*>(plane + layout.row(block, place));
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
        const int pair = lane + i * kWarp;
        if (pair >= KV_HEAD_DIM / 2) break;
        const int2 at = dimensions(pair, rotary, interleaved);
        row[at.x] = KV_CACHE::narrow(values[i][0] * by);
        row[at.y] = KV_CACHE::narrow(values[i][1] * by);
    }
}

}  // namespace

// Grid: rows, (query heads + 2 * K/V heads) / warps of a thread block, rounded up.
extern "C" __global__ void __launch_bounds__(KV_THREADS) kv_rope_cache(const RopeCache call) {
    const int row = blockIdx.x, lane = threadIdx.x % kWarp;
    const int query_heads = static_cast<int>(call.query_heads), kv_heads = static_cast<int>(call.kv_heads);
    int head = blockIdx.y * (KV_THREADS / kWarp) + threadIdx.x / kWarp;
    if (head >= query_heads + 2 * kv_heads) return;
    const KV_QUERY::Stored* from = call.queries + row * call.query_stride;
    const bool is_query = head < query_heads, is_value = head >= query_heads + kv_heads;
    if (is_value) {
        head -= query_heads + kv_heads;
        from = call.values + row * call.value_stride;
    } else if (!is_query) {
        head -= query_heads;
        from = call.keys + row * call.key_stride;
    }
    const int slot = call.slots[row];
    if (!is_query && slot < 0) return;
    const int rotary = is_value ? 0 : static_cast<int>(call.rotary);
    const bool interleaved = call.interleaved != 0;
    const float* const turns = call.turns + call.positions[row] * call.rotary;
    float values[kPairs][2];
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
        const int pair = lane + i * kWarp;
        values[i][0] = values[i][1] = 0.f;
        if (pair >= KV_HEAD_DIM / 2) break;
        const int2 at = dimensions(pair, rotary, interleaved);
        const float x = KV_QUERY::widen(from[head * KV_HEAD_DIM + at.x]);
        const float y = KV_QUERY::widen(from[head * KV_HEAD_DIM + at.y]);
        const bool turned = pair < rotary / 2;
        const float cosine = turned ? turns[2 * pair] : 1.f, sine = turned ? turns[2 * pair + 1] : 0.f;
        values[i][0] = x * cosine - y * sine;
        values[i][1] = y * cosine + x * sine;
    }
    if (!is_query) {
        const CacheLayout<KV_CACHE, KV_HEAD_DIM> layout{static_cast<int>(call.block_tokens), kv_heads, head};
        store(is_value ? call.value_plane : call.key_plane, layout, slot, rotary, interleaved, values);
        return;
    }
    KV_QUERY::Stored* const to = call.rotated + (static_cast<long long>(row) * query_heads + head) * KV_HEAD_DIM;
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
        const int pair = lane + i * kWarp;
        if (pair >= KV_HEAD_DIM / 2) break;
        const int2 at = dimensions(pair, rotary, interleaved);
        to[at.x] = KV_QUERY::narrow(values[i][0]);
        to[at.y] = KV_QUERY::narrow(values[i][1]);
    }
}
