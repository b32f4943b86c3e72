// K and V of a row's keys, tile by tile, in shared memory: two buffers, one filled while the other is read.
//
// Keys are counted as the row sees them: first the sinks, then those in the window (or all). A tile's keys past the last
// visible one are zeros: what is in the pool there is never read.
#pragma once

#include "cache_layout.h"

// Which keys a row sees: `sinks` ones from the start, then all from `sinks + skipped` on. `count` in all.
struct Visible {
    int count, sinks, skipped;

    __device__ __forceinline__ static Visible of(int context, long long window, long long sink_tokens) {
        const long long first = window > 0 && window < context ? context - window : 0;
        const int sinks = static_cast<int>(sink_tokens < first ? sink_tokens : first);
        const int skipped = static_cast<int>(first) - sinks;
        return {context - skipped, sinks, skipped};
    }
    __device__ __forceinline__ int position(int key) const { return key < sinks ? key : key + skipped; }
};

template <class Element, int kHeadDim, int kTile, int kThreads>
struct Tiles {
    static constexpr int kParts = kThreads / kTile;  // threads that share a key's score
    static constexpr int kRowBytes = CacheLayout<Element, kHeadDim>::kRowBytes;
    static constexpr int kChunks = kRowBytes / 16;
    // Eight threads read 16 bytes at a time, of 8 / kParts rows: no two of the same bank, if rows start kParts chunks
    // further modulo 8.
    static constexpr int kStride = (kChunks + (8 + kParts - kChunks % 8) % 8) * 16;
    static constexpr int kBufferBytes = kTile * kStride;
    static constexpr int kScaleBytes = Element::kScaled ? kTile * 4 : 0;
    static constexpr int kSharedBytes = 4 * (kBufferBytes + kScaleBytes);
    static constexpr int kLanes = 8;  // neighbours that copy a row together
    static_assert(kTile * kParts == kThreads && kParts <= 8 && kTile % (kThreads / kLanes) == 0, "see the loops");

    unsigned char* shared;
    const unsigned char* planes[2];  // K, V
    const int* table;
    CacheLayout<Element, kHeadDim> layout;
    Visible visible;

    __device__ __forceinline__ unsigned char* rows(int buffer, int plane) const {
        return shared + (2 * buffer + plane) * kBufferBytes;
    }
    __device__ __forceinline__ float* scales(int buffer, int plane) const {
        return reinterpret_cast<float*>(shared + 4 * kBufferBytes + (2 * buffer + plane) * kScaleBytes);
    }

    // Begin to copy the keys `first`.. below `end`, the rest as zeros, into `buffer`.
    __device__ __forceinline__ void begin(int buffer, int first, int end) const {
        const int lane = threadIdx.x % kLanes;
#pragma unroll
        for (int key = threadIdx.x / kLanes; key < kTile; key += kThreads / kLanes) {
            const bool is_there = first + key < end;
            const int position = is_there ? visible.position(first + key) : 0;
            const int slot = position % layout.block_tokens;
            const int block = is_there ? table[position / layout.block_tokens] : 0;
            const long long at = layout.row(block, slot);
#pragma unroll
            for (int plane = 0; plane < 2; plane++) {
#pragma unroll
                for (int chunk = lane; chunk < kChunks; chunk += kLanes)
                    copy_async<16>(rows(buffer, plane) + key * kStride + chunk * 16,
                                   planes[plane] + (is_there ? at + chunk * 16 : 0), is_there);
                if (Element::kScaled && lane == plane)
                    copy_async<4>(scales(buffer, plane) + key,
                                  planes[plane] + (is_there ? layout.scale(block, slot) : 0), is_there);
            }
        }
    }
};
