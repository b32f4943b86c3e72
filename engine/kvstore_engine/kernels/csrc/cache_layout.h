// Where a token's K (or V) is in an engine block of a plane.
//
// A plane is [blocks][block bytes]. A block is [block_tokens][kv_heads][head_dim] elements; with a scaled type
// [block_tokens][kv_heads] float scales follow in the same block: a block that is moved takes its scales along.
#pragma once

#include "elements.h"

template <class Element, int kHeadDim>
struct CacheLayout {
    static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(typename Element::Stored));
    static_assert(kRowBytes % 16 == 0, "a row is copied in pieces of 16 bytes");

    int block_tokens, kv_heads, head;

    __device__ __forceinline__ long long block_bytes() const {
        const long long rows = static_cast<long long>(block_tokens) * kv_heads;
        return rows * (kRowBytes + (Element::kScaled ? 4 : 0));
    }
    // Of the row in `slot` of block `block`, in bytes from the plane's start.
    __device__ __forceinline__ long long row(int block, int slot) const {
        return block * block_bytes() + (static_cast<long long>(slot) * kv_heads + head) * kRowBytes;
    }
    __device__ __forceinline__ long long scale(int block, int slot) const {
        const long long rows = static_cast<long long>(block_tokens) * kv_heads;
        return block * block_bytes() + rows * kRowBytes + (static_cast<long long>(slot) * kv_heads + head) * 4;
    }
};
