// Attention of one row and up to kHeads query heads that share a K/V head, over a range of the keys that the row sees.
//
// One thread block computes it, with an online softmax: for each tile the scores, their weights, the weighted sum of V.
// A score is computed by kParts neighbouring threads; in the sum each warp takes its share of a tile's keys, each lane a
// part of the head's dimensions. K and V are read once for all kHeads heads. Sums are floats, in an order that the
// range alone fixes.
#pragma once

#include "attention_tiles.h"

template <class Query, class Cache, int kHeadDim, int kHeads, int kTile, int kThreads>
struct Attend {
    typedef Tiles<Cache, kHeadDim, kTile, kThreads> CacheTiles;
    static constexpr int kWarps = kThreads / kWarp;
    static constexpr int kWarpKeys = kTile / kWarps;  // of a tile, that a warp sums
    static constexpr int kPairs = (kHeadDim / 2 + kWarp - 1) / kWarp;  // of dimensions, that a lane sums
    static constexpr int kWarpHeads = (kHeads + kWarps - 1) / kWarps;  // whose softmax a warp computes
    static constexpr int kQueryBytes = kHeads * kHeadDim * 4;
    static constexpr int kScoreBytes = kHeads * kTile * 4;
    static constexpr int kStateBytes = (kHeads * 4 + 15) / 16 * 16;
    static constexpr int kMergeBytes = kWarps * kHeads * kHeadDim * 4;  // over the tiles, when they are done with
    static constexpr int kTilesBytes =
        CacheTiles::kSharedBytes > kMergeBytes ? CacheTiles::kSharedBytes : kMergeBytes;
    static constexpr int kSharedBytes = kTilesBytes + kQueryBytes + kScoreBytes + 3 * kStateBytes;
    static constexpr float kLog2E = 1.4426950408889634f;
    static_assert(kHeadDim % 16 == 0 && kHeadDim >= 16 && kHeadDim <= 256, "see kRowBytes and kPairs");
    static_assert(kWarpKeys % 4 == 0, "weights are read four at a time");

    CacheTiles tiles;
    float *query, *scores, *shrink, *top, *total;  // the last three: one for each head
    float scale, softcap;
    float sum[kHeads][kPairs][2];

    __device__ __forceinline__ void place(unsigned char* shared) {
        tiles.shared = shared;
        query = reinterpret_cast<float*>(shared + kTilesBytes);
        scores = query + kHeads * kHeadDim;
        shrink = scores + kHeads * kTile;
        top = shrink + kStateBytes / 4;
        total = top + kStateBytes / 4;
    }

    // The sums over the keys `first`..`last` - 1, at least one: `merged`, `top` and `total` have the results afterwards.
    __device__ __forceinline__ void run(const typename Query::Stored* queries, int heads, int first, int last) {
        tiles.begin(0, first, last);
        for (int i = threadIdx.x; i < kHeads * kHeadDim; i += kThreads)
            query[i] = i < heads * kHeadDim ? Query::widen(queries[i]) * scale : 0.f;
        for (int i = threadIdx.x; i < kHeads; i += kThreads) top[i] = minus_infinity(), total[i] = 0.f;
#pragma unroll
        for (int head = 0; head < kHeads; head++)
            for (int pair = 0; pair < kPairs; pair++) sum[head][pair][0] = sum[head][pair][1] = 0.f;
        for (int at = first, buffer = 0; at < last; at += kTile, buffer ^= 1) {
            wait_copies();
            __syncthreads();  // this tile is there, and the one before has been read
            if (at + kTile < last) tiles.begin(buffer ^ 1, at + kTile, last);
            score(buffer, last - at);
            __syncthreads();
            weigh(buffer);
            __syncthreads();
            add(buffer);
        }
        __syncthreads();
        leave_sums();
        __syncthreads();
    }

    // Over the warps' shares. `index` is head * kHeadDim + dimension.
    __device__ __forceinline__ float merged(int index) const {
        const float* const shares = reinterpret_cast<const float*>(tiles.shared);
        float value = 0.f;
#pragma unroll
        for (int warp = 0; warp < kWarps; warp++) value += shares[warp * kHeads * kHeadDim + index];
        return value;
    }

  private:
    // Scores are in units of log2, so that weights are powers of two. Keys past `count` get no weight.
    __device__ __forceinline__ void score(int buffer, int count) {
        constexpr int kParts = CacheTiles::kParts, kElements = Chunk<Cache>::kElements;
        const int key = threadIdx.x / kParts, part = threadIdx.x % kParts;
        const unsigned char* const row = tiles.rows(buffer, 0) + key * CacheTiles::kStride;
        float dot[kHeads];
#pragma unroll
        for (int head = 0; head < kHeads; head++) dot[head] = 0.f;
#pragma unroll
        for (int chunk = part; chunk < CacheTiles::kChunks; chunk += kParts) {
            float elements[kElements];
            Chunk<Cache>::widen(row + chunk * 16, elements);
#pragma unroll
            for (int head = 0; head < kHeads; head++) {
                const float* const with = query + head * kHeadDim + chunk * kElements;
#pragma unroll
                for (int i = 0; i < kElements; i += 4) {
                    const float4 four = *reinterpret_cast<const float4*>(with + i);
                    dot[head] += four.x * elements[i] + four.y * elements[i + 1] + four.z * elements[i + 2] +
                                 four.w * elements[i + 3];
                }
            }
        }
        const float key_scale = Cache::kScaled ? tiles.scales(buffer, 0)[key] : 1.f;
#pragma unroll
        for (int head = 0; head < kHeads; head++) {
            float value = dot[head];
#pragma unroll
            for (int step = kParts / 2; step; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
            value *= key_scale;
            if (softcap > 0.f) value = softcap * tanhf(value / softcap);
            if (head % kParts == part) scores[head * kTile + key] = key < count ? value * kLog2E : minus_infinity();
        }
    }

    // Scores become weights against the greatest score so far; `shrink` is what earlier sums lose by a greater one.
    __device__ __forceinline__ void weigh(int buffer) {
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
        for (int i = 0; i < kWarpHeads; i++) {
            const int head = warp + i * kWarps;
            if (head >= kHeads) break;
            float* const row = scores + head * kTile;
            const float before = top[head];
            float greatest = before;
#pragma unroll
            for (int key = lane; key < kTile; key += kWarp) greatest = fmaxf(greatest, row[key]);
            greatest = warp_max(greatest);
            float weights = 0.f;
#pragma unroll
            for (int key = lane; key < kTile; key += kWarp) {
                const float weight = exp2f(row[key] - greatest);
                weights += weight;
                row[key] = Cache::kScaled ? weight * tiles.scales(buffer, 1)[key] : weight;
            }
            weights = warp_sum(weights);
            if (lane == 0) {
                const float less = exp2f(before - greatest);
                shrink[head] = less;
                total[head] = total[head] * less + weights;
                top[head] = greatest;
            }
        }
    }

    __device__ __forceinline__ void add(int buffer) {
        typedef typename Cache::Stored Stored;
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
        for (int head = 0; head < kHeads; head++)
#pragma unroll
            for (int pair = 0; pair < kPairs; pair++) {
                sum[head][pair][0] *= shrink[head];
                sum[head][pair][1] *= shrink[head];
            }
        const unsigned char* const rows = tiles.rows(buffer, 1);
        for (int key = warp * kWarpKeys; key < (warp + 1) * kWarpKeys; key += 4) {
            float values[4][kPairs][2];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int pair = 0; pair < kPairs; pair++) {
                    const int at = 2 * (lane + pair * kWarp);
                    const Stored* const row = reinterpret_cast<const Stored*>(rows + (key + i) * CacheTiles::kStride);
                    values[i][pair][0] = at < kHeadDim ? Cache::widen(row[at]) : 0.f;
                    values[i][pair][1] = at < kHeadDim ? Cache::widen(row[at + 1]) : 0.f;
                }
#pragma unroll
            for (int head = 0; head < kHeads; head++) {
                const float4 weights = *reinterpret_cast<const float4*>(scores + head * kTile + key);
#pragma unroll
                for (int pair = 0; pair < kPairs; pair++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        sum[head][pair][half] += weights.x * values[0][pair][half] + weights.y * values[1][pair][half] +
                                                 weights.z * values[2][pair][half] + weights.w * values[3][pair][half];
            }
        }
    }

    __device__ __forceinline__ void leave_sums() {
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
        float* const share = reinterpret_cast<float*>(tiles.shared) + warp * kHeads * kHeadDim;
#pragma unroll
        for (int head = 0; head < kHeads; head++)
#pragma unroll
            for (int pair = 0; pair < kPairs; pair++) {
                const int at = 2 * (lane + pair * kWarp);
                if (at < kHeadDim) {
                    share[head * kHeadDim + at] = sum[head][pair][0];
                    share[head * kHeadDim + at + 1] = sum[head][pair][1];
                }
            }
    }
};
