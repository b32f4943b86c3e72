// What Python hands to the kernels: layout.py's structs, field by field. All fields are 64 bits wide.
#pragma once
#include <cstdint>

// Constant for all layers of one step.
struct Step {
    int64_t query_heads, kv_heads, head_dim;
    int64_t block_tokens, table_stride;         // tokens in an engine block; int32s from one block table to the next
    int64_t kv_type, row_bytes;                 // ggml's number of the K and V type; bytes of one token's K (or V)
    int64_t data_offset, source_offset;         // of `data` and `src[0]` in this ggml's struct ggml_tensor
    const int32_t* sequences;                   // [n][4]: first row, rows, tokens in context after them, pages read (0: all)
    const int32_t* tables;                      // [n][table_stride]: engine block ids
    int64_t item_count;
    const struct Item* items;                   // [item_count]
    float* partials;                            // see Item::partial
    int32_t* pending;                           // for each split tile its unfinished items; 0 before and after a step
    int64_t sequence_count, page_stride;        // n of `sequences`; pages of the longest context
    uint8_t* chosen;                            // [n][kv_heads][page_stride]: 1 if the sequence's row reads the page
    float* page_scores;                         // [n][kv_heads][2][page_stride], for page_choice.cpp alone
};

struct Item {
    int32_t sequence, kv_head, first_query, queries;
    // Not split: split == 0, and the item covers the context. Else the item is one of `split` that share a tile of
    // queries; it covers the spans [first_span, last_span) and leaves each one's state in `partials`, from record
    // partial + span * rows on. Whoever finishes last (pending[tile] counts) merges them, in order.
    int32_t first_span, last_span, split, tile, partial, last_of_tile;  // last_of_tile: the tile's spans, all items'
    int32_t kv_heads, unused;                   // heads from kv_head on; `rows` are those of all, one behind another
};

struct Layer {
    const void* keys;                           // [blocks][block_tokens][kv_heads][head_dim]
    const void* values;
    const Step* step;
    int64_t window, sink_tokens;                // a row sees the last `window` keys (0: all) and the first `sink_tokens`
    double scale, softcap;                      // of the scores; 0: no cap
    uint16_t* bounds;                           // [blocks][kv_heads][2][head_dim], bfloat16; null: rows of this layer read all pages
    uint8_t* known;                             // [blocks], known_stride apart, [kv_heads]: 1 where `bounds` has the block's
    int64_t known_stride;
    int64_t next_choice, next_item;             // taken so far, by any thread; 0 before the step
};

struct Product {
    int64_t data_offset, source_offset, extent_offset;  // of `data`, `src[0]` and `ne[0]` in struct ggml_tensor
    int64_t next_column, finished;              // taken so far; threads that are done. 0 before and after a product
};

constexpr int64_t kSpanKeys = 256;              // keys in a span: SPAN_TOKENS of layout.py
constexpr int64_t kPageKeys = 32;               // keys in a page: PAGE_TOKENS of layout.py
