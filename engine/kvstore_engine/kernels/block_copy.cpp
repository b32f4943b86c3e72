// Moves whole storage blocks between the paged cache and contiguous payloads.
//
// A payload is [plane][engine block of the storage block]; planes are K and V of each layer in turn. Engine blocks
// that lie next to each other in the pool move in one memcpy. Threads take storage blocks in turn, whoever is free the
// next: a thread that starts late, or shares its core, does fewer. A single core does not saturate memory, two nearly do.
//
// Into the pool the copy streams past the caches (non-temporal stores), as memcpy itself does for copies larger than a
// cache: a restored prefix is one, though each of its pieces is small. Measured on Zen 5 with 41 MB in pieces of 24 KiB,
// two threads: 1.0 ms, memcpy 1.6. Out of the pool it does not: the daemon reads the bytes next.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
using Vector = __m512i;
inline Vector load(const char* from) { return _mm512_loadu_si512(from); }
inline void stream(char* to, Vector value) { _mm512_stream_si512(reinterpret_cast<Vector*>(to), value); }
#elif defined(__AVX__)
using Vector = __m256i;
inline Vector load(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const Vector*>(from)); }
inline void stream(char* to, Vector value) { _mm256_stream_si256(reinterpret_cast<Vector*>(to), value); }
#endif

// memcpy that leaves nothing of `to` in the caches, where the machine can and `to` is aligned for it.
void copy_streaming(char* to, const char* from, int64_t bytes) {
#if defined(__AVX512F__) || defined(__AVX__)
    constexpr int64_t width = sizeof(Vector);
    if (reinterpret_cast<uintptr_t>(to) % width == 0) {
        for (; bytes >= 4 * width; bytes -= 4 * width, to += 4 * width, from += 4 * width) {
            const Vector a = load(from), b = load(from + width), c = load(from + 2 * width), d = load(from + 3 * width);
            stream(to, a);
            stream(to + width, b);
            stream(to + 2 * width, c);
            stream(to + 3 * width, d);
        }
    }
#endif
    std::memcpy(to, from, bytes);
}

// Streamed stores are weakly ordered: before another thread is told of them they must have happened.
void finish_streaming() {
#if defined(__AVX512F__) || defined(__AVX__)
    _mm_sfence();
#endif
}

struct Copy {
    char* const* planes;       // [plane_count]: pool memory, [blocks][block_bytes]
    char* const* payloads;     // [storage_blocks]
    const int32_t* tables;     // [storage_blocks][blocks_per_payload]
    int64_t plane_count, storage_blocks, blocks_per_payload, block_bytes;
    bool into_pool;
};

void copy_plane(const Copy& copy, int64_t storage_block, int64_t plane) {
    const int32_t* const table = copy.tables + storage_block * copy.blocks_per_payload;
    char* const payload = copy.payloads[storage_block] + plane * copy.blocks_per_payload * copy.block_bytes;
    for (int64_t i = 0; i < copy.blocks_per_payload;) {
        int64_t run = 1;
        while (i + run < copy.blocks_per_payload && table[i + run] == table[i] + run) run++;
        char* const pooled = copy.planes[plane] + table[i] * copy.block_bytes;
        char* const packed = payload + i * copy.block_bytes;
        if (copy.into_pool)
            copy_streaming(pooled, packed, run * copy.block_bytes);
        else
            std::memcpy(packed, pooled, run * copy.block_bytes);
        i += run;
    }
}

void copy_blocks(const Copy& copy, std::atomic<int64_t>& next) {
    for (int64_t block = next++; block < copy.storage_blocks; block = next++)
        for (int64_t plane = 0; plane < copy.plane_count; plane++) copy_plane(copy, block, plane);
    finish_streaming();
}

}  // namespace

// The caller has checked every id in `tables` and the size of every payload.
extern "C" void kv_copy_blocks(char* const* planes, char* const* payloads, const int32_t* tables, int64_t plane_count,
                               int64_t storage_blocks, int64_t blocks_per_payload, int64_t block_bytes,
                               int32_t into_pool, int32_t threads) {
    const Copy copy{planes, payloads, tables, plane_count, storage_blocks, blocks_per_payload, block_bytes,
                    into_pool != 0};
    std::atomic<int64_t> next{0};
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads && i < storage_blocks; i++)
        others.emplace_back(copy_blocks, std::cref(copy), std::ref(next));
    copy_blocks(copy, next);
    for (auto& other : others) other.join();
}
