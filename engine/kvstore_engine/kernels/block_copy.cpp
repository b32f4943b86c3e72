// Moves whole storage blocks between the paged cache and contiguous payloads.
//
// A payload is [plane][engine block of the storage block]; planes are K and V of each layer in turn. Engine blocks
// that lie next to each other in the pool move in one memcpy. Threads share the (storage block, plane) pairs; a
// single core does not saturate memory, two nearly do.

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

struct Copy {
    char* const* planes;       // [plane_count]: pool memory, [blocks][block_bytes]
    char* const* payloads;     // [storage_blocks]
    const int32_t* tables;     // [storage_blocks][blocks_per_payload]
    int64_t plane_count, storage_blocks, blocks_per_payload, block_bytes;
    bool into_pool;
};

void copy_pairs(const Copy& copy, int64_t first, int64_t last) {
    for (int64_t pair = first; pair < last; pair++) {
        const int64_t storage_block = pair / copy.plane_count, plane = pair % copy.plane_count;
        const int32_t* const table = copy.tables + storage_block * copy.blocks_per_payload;
        char* const payload = copy.payloads[storage_block] + plane * copy.blocks_per_payload * copy.block_bytes;
        for (int64_t i = 0; i < copy.blocks_per_payload;) {
            int64_t run = 1;
            while (i + run < copy.blocks_per_payload && table[i + run] == table[i] + run) run++;
            char* const pooled = copy.planes[plane] + table[i] * copy.block_bytes;
            char* const packed = payload + i * copy.block_bytes;
            std::memcpy(copy.into_pool ? pooled : packed, copy.into_pool ? packed : pooled, run * copy.block_bytes);
            i += run;
        }
    }
}

}  // namespace

// The caller has checked every id in `tables` and the size of every payload.
extern "C" void kv_copy_blocks(char* const* planes, char* const* payloads, const int32_t* tables, int64_t plane_count,
                               int64_t storage_blocks, int64_t blocks_per_payload, int64_t block_bytes,
                               int32_t into_pool, int32_t threads) {
    const Copy copy{planes, payloads, tables, plane_count, storage_blocks, blocks_per_payload, block_bytes,
                    into_pool != 0};
    const int64_t pairs = plane_count * storage_blocks;
    std::vector<std::thread> others;
    for (int32_t i = 1; i < threads; i++)
        others.emplace_back(copy_pairs, std::cref(copy), pairs * i / threads, pairs * (i + 1) / threads);
    copy_pairs(copy, 0, threads > 1 ? pairs / threads : pairs);
    for (auto& other : others) other.join();
}
