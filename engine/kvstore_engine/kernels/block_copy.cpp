// Moves whole storage blocks between the paged cache and contiguous payloads, and engine blocks within the cache.
//
// A payload is [plane][engine block of the storage block]; planes are K and V of each layer in turn. Engine blocks
// that lie next to each other in the pool move in one memcpy. Threads take planes in turn, whoever is free the
// next: a thread that starts late, or shares its core, does fewer. A single core does not saturate memory, two nearly do.
//
// Into the pool the copy streams past the caches (non-temporal stores), as memcpy itself does for copies larger than a
// cache: a restored prefix is one, though each of its pieces is small. Measured on Zen 5 with 41 MB in pieces of 24 KiB,
// two threads: 1.0 ms, memcpy 1.6. Out of the pool it does not: the daemon reads the bytes next.

#include <cstdint>
#include <cstring>
#include <pthread.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace {

// memcpy that leaves nothing of `to` in the caches, where the machine can and `to` is aligned for it.
void copy_streaming(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
    // Sixteen bytes at a time: stores are joined to whole cache lines before they leave, so wider ones gain nothing.
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        for (; bytes >= 64; bytes -= 64, to += 64, from += 64) {
            __m128i line[4];
            for (int i = 0; i < 4; i++) line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
            for (int i = 0; i < 4; i++) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line[i]);
        }
    }
#endif
    std::memcpy(to, from, bytes);
}

// Streamed stores are weakly ordered: before another thread is told of them they must have happened.
void finish_streaming() {
#if defined(__x86_64__)
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

constexpr int kMostThreads = 64;

template <class Work>
struct Shares {
    const Work& work;
    int64_t units, next;

    static void* take(void* given) {
        Shares& shares = *(Shares*)given;
        int64_t unit;
        while ((unit = __atomic_fetch_add(&shares.next, 1, __ATOMIC_RELAXED)) < shares.units) shares.work(unit);
        finish_streaming();
        return nullptr;
    }
};

// Runs `work(0)`..`work(units - 1)` on `threads` threads, or as many as the system gives, whoever is free the next.
// Not by std::thread: without C++'s library the kernels are built and loaded where there is none.
template <class Work>
void share_out(int64_t units, int32_t threads, const Work& work) {
    Shares<Work> shares{work, units, 0};
    const int64_t most = threads < kMostThreads ? threads : kMostThreads, wanted = most < units ? most : units;
    pthread_t others[kMostThreads];
    int64_t started = 0;
    while (started + 1 < wanted && !pthread_create(others + started, nullptr, Shares<Work>::take, &shares)) started++;
    Shares<Work>::take(&shares);
    for (int64_t i = 0; i < started; i++) pthread_join(others[i], nullptr);
}

}  // namespace

// The caller has checked every id in `tables` and the size of every payload.
extern "C" void kv_copy_blocks(char* const* planes, char* const* payloads, const int32_t* tables, int64_t plane_count,
                               int64_t storage_blocks, int64_t blocks_per_payload, int64_t block_bytes,
                               int32_t into_pool, int32_t threads) {
    const Copy copy{planes, payloads, tables, plane_count, storage_blocks, blocks_per_payload, block_bytes,
                    into_pool != 0};
    share_out(storage_blocks * plane_count, threads,
              [&](int64_t unit) { copy_plane(copy, unit / plane_count, unit % plane_count); });
}

// Block sources[i] of every plane over block targets[i]; the caller has checked that no source is a target.
extern "C" void kv_move_blocks(char* const* planes, const int32_t* sources, const int32_t* targets, int64_t plane_count,
                               int64_t count, int64_t block_bytes, int32_t threads) {
    share_out(plane_count, threads, [&](int64_t plane) {
        for (int64_t i = 0; i < count;) {
            int64_t run = 1;
            while (i + run < count && sources[i + run] == sources[i] + run && targets[i + run] == targets[i] + run) run++;
            std::memcpy(planes[plane] + targets[i] * block_bytes, planes[plane] + sources[i] * block_bytes,
                        run * block_bytes);
            i += run;
        }
    });
}
