// What Python hands to the kernels: layout.py's structs, field by field. All fields are 64 bits wide.
#pragma once
#include <cstdint>

// Constant for all layers of one step.
struct Step {
    int64_t query_heads, kv_heads, head_dim;
    int64_t block_tokens, table_stride;         // tokens in an engine block; int32s from one block table to the next
    int64_t element_bytes, row_bytes;           // of one K (or V) element: 2 is f16, 4 is f32; of one token's K
    int64_t data_offset, source_offset;         // of `data` and `src[0]` in this ggml's struct ggml_tensor
    const int32_t* sequences;                   // [n][4]: first row, rows, tokens in context after them, unused
    const int32_t* tables;                      // [n][table_stride]: engine block ids
    int64_t item_count;
    const int32_t* items;                       // [item_count][4]: sequence, K/V head, first query, queries
};

struct Layer {
    const void* keys;                           // [blocks][block_tokens][kv_heads][head_dim]
    const void* values;
    const Step* step;
    int64_t next_item;                          // taken so far, by any thread; 0 before the step
};
