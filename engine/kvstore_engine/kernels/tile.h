// K and V of one tile: where their rows lie in the pool, and how they are read.
//
// Owns the rule that nothing is read which no row of the pass sees: it may hold anything.
#pragma once

#include "elements.h"
#include "pass.h"

namespace {

// Where this K/V head's part of each row lies in a plane. Rows that no query sees may hold anything: zeros instead.
struct TileRows {
    int64_t offset[kKeys];  // to the row; -1: not seen
    int count;              // keys up to the last that is seen
};

TileRows locate(const Pass& pass, int64_t first_key) {
    const Step& step = *pass.step;
    TileRows tile;
    tile.count = int(std::min<int64_t>(kKeys, pass.end() - first_key));
    int64_t block = first_key / step.block_tokens, within = first_key % step.block_tokens;
    const int64_t start = pass.window_start(0) - first_key, sinks = pass.layer->sink_tokens - first_key;
    for (int64_t t = 0; t < tile.count; block++, within = 0) {
        int64_t offset = (pass.table[block] * step.block_tokens + within) * step.row_bytes;
        const int64_t end = std::min<int64_t>(tile.count, t + step.block_tokens - within);
        for (; t < end; t++, offset += step.row_bytes) tile.offset[t] = t >= start || t < sinks ? offset : -1;
    }
    return tile;
}

// This head's part of a plane's rows of a tile, as they are stored.
template <class Element>
struct Stored {
    const char* row[kKeys];
    int64_t first;  // the head's first channel within its block

    Stored(const Pass& pass, const void* plane, const TileRows& tile) {
        const int64_t before = pass.kv_head * pass.head_dim;
        const char* const head = (const char*)plane + before / Element::elements * Element::bytes;
        first = before % Element::elements;
        for (int t = 0; t < tile.count; t++) row[t] = tile.offset[t] < 0 ? (const char*)kZeros : head + tile.offset[t];
        for (int t = tile.count; t < kKeys; t++) row[t] = (const char*)kZeros;
    }
    Eight eight(int t, int64_t channel) const { return Element::widen(row[t], first + channel); }
    Floats floats(int t, int64_t channel) const { return Element::floats(row[t], first + channel); }
};

// The same, widened into the workspace.
struct Widened {
    const float* values;
    int64_t stride;
    Eight eight(int t, int64_t channel) const { return load_eight(values + t * stride + channel); }
    Floats floats(int t, int64_t channel) const { return load(values + t * stride + channel); }
};

template <class Element>
Widened widen(const Pass& pass, const void* plane, const TileRows& tile, float* target) {
    const Stored<Element> stored(pass, plane, tile);
    if constexpr (Element::elements == 32)
        if (stored.first == 0 && pass.head_dim % 32 == 0) {
            for (int t = 0; t < tile.count; t++)
                for (int64_t d = 0; d < pass.head_dim; d += 32)
                    Element::widen_block(stored.row[t] + d / 32 * Element::bytes, target + t * pass.stride + d);
            return {target, pass.stride};
        }
    for (int t = 0; t < tile.count; t++)
        for (int64_t d = 0; d < pass.head_dim; d += 8) store_eight(target + t * pass.stride + d, stored.eight(t, d));
    return {target, pass.stride};
}

// Reads the parts of `heads` heads, from this one on, of the rows: a byte of each line, in the order of addresses, by
// which processors know what to fetch ahead. Loops over one head's keys leave out what lies between.
inline void read_through(const Pass& pass, const void* plane, const TileRows& tile, int64_t heads) {
    const int64_t head_bytes = pass.step->row_bytes / pass.step->kv_heads;
    for (int t = 0; t < tile.count; t++) {
        if (tile.offset[t] < 0) continue;
        const char* const head = (const char*)plane + tile.offset[t] + pass.kv_head * head_bytes;
        for (int64_t i = 0; i < heads * head_bytes; i += 64) *(const volatile char*)(head + i);
    }
}

// turned[channel][key] = keys[key][channel]
void turn(const Widened& keys, int64_t head_dim, float* turned) {
    for (int64_t d = 0; d < head_dim; d += 8)
        for (int t = 0; t < kKeys; t += 8) {
            Eight rows[8];
            for (int i = 0; i < 8; i++) rows[i] = keys.eight(t + i, d);
            transpose(rows);
            for (int i = 0; i < 8; i++) store_eight(turned + (d + i) * kKeys + t, rows[i]);
        }
}

}  // namespace
