// What products with quantised matrices share: rows quantised as ggml quantises them, and columns shared out among
// threads. x86 with AVX2.
#pragma once

#include "elements.h"
#include "layout.h"

#include <cstdio>
#include <cstdlib>
#include <pthread.h>

namespace {

constexpr int64_t kBlock = 32;    // elements that share a scale
constexpr int64_t kTogether = 8;  // columns that are interleaved
constexpr int64_t kCacheLine = 64;

// What a product's node in ggml's graph names. Source 0: f32 [count][elements], contiguous; source 1: the matrix;
// source 2, if there is one: f32 [count][columns], contiguous, added to the product; destination: f32 [count][columns].
struct Operands {
    const float* values;
    const char* matrix;
    const float* addend;  // null: none
    float* output;
    int64_t count, elements, columns;

    Operands(const char* destination, const Product* product) {
        const auto source = [&](int index) { return ((const char* const*)(destination + product->source_offset))[index]; };
        const auto data = [&](const char* tensor) { return *(char* const*)(tensor + product->data_offset); };
        const auto extent = [&](const char* tensor, int axis) {
            return ((const int64_t*)(tensor + product->extent_offset))[axis];
        };
        values = (const float*)data(source(0));
        matrix = data(source(1));
        addend = source(2) ? (const float*)data(source(2)) : nullptr;
        output = (float*)data(destination);
        count = extent(source(0), 1);
        elements = extent(source(1), 0);
        columns = extent(source(1), 1);
    }
};

// Calls work(begin, end) for columns that no other thread has, `portion` at a time, until there are none. A thread takes
// long runs of portions first, since what it fetches ahead at the end of a run is another's; then shorter and shorter
// ones, so that all threads end together.
template <class Work>
void share_columns(Product* product, int threads, int64_t columns, int64_t portion, const Work& work) {
    int64_t* const next = &product->next_column;
    int64_t begin = __atomic_load_n(next, __ATOMIC_RELAXED);
    while (begin < columns) {
        const int64_t fair = (columns - begin) / (2 * threads) / portion * portion;
        const int64_t end = std::min(begin + std::max(fair, portion), columns);
        if (!__atomic_compare_exchange_n(next, &begin, end, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
        for (; begin < end; begin += portion) work(begin, std::min(begin + portion, end));
        begin = __atomic_load_n(next, __ATOMIC_RELAXED);
    }
    // Whoever leaves last makes the counters ready for the next product, which starts behind a barrier.
    if (__atomic_add_fetch(&product->finished, 1, __ATOMIC_ACQ_REL) == threads) {
        product->next_column = 0;
        product->finished = 0;
    }
}

// 32 values to int8, as quantize_row_q8_0. Returns their scale.
inline float quantise(const float* values, int8_t* quantised) {
    __m256 part[4], largest = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) {
        part[i] = _mm256_loadu_ps(values + 8 * i);
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(_mm256_set1_ps(-0.f), part[i]));
    }
    __m128 four = _mm_max_ps(_mm256_extractf128_ps(largest, 1), _mm256_castps256_ps128(largest));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    const float peak = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    const __m256 inverse = _mm256_set1_ps(peak != 0 ? 127.f / peak : 0.f);
    __m256i whole[4];
    for (int i = 0; i < 4; i++)
        whole[i] = _mm256_cvtps_epi32(_mm256_round_ps(_mm256_mul_ps(part[i], inverse), _MM_FROUND_TO_NEAREST_INT));
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    // Packing goes by halves of the registers: put the groups of four in order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)quantised, _mm256_permutevar8x32_epi32(bytes, order));
    return half_to_float(_cvtss_sh(peak / 127.f, _MM_FROUND_TO_NEAREST_INT));
}

// Calls make(values, place) for each block of each row. `place`: of `most` rows at a time the same block of
// each row together.
template <class Make>
void lay_together(const Operands& given, int64_t most, const Make& make) {
    const int64_t blocks = given.elements / kBlock;
    for (int64_t row = 0; row < given.count; row++) {
        const int64_t first = row / most * most, together = std::min(most, given.count - first);
        for (int64_t block = 0; block < blocks; block++)
            make(given.values + row * given.elements + block * kBlock,
                 first * blocks + block * together + (row - first));
    }
}

inline int32_t sum_of_bytes(const int8_t* values) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)values);
    const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    return _mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 1);
}

const pthread_key_t kWorkspace = [] {
    pthread_key_t key;
    pthread_key_create(&key, std::free);
    return key;
}();

// This thread's `bytes` bytes of memory: kept for its next product, freed when it ends. A node of a graph has no way to
// fail, so that without memory the process ends with a message, as ggml's own do.
inline void* workspace(size_t bytes) {
    thread_local size_t held = 0;
    if (held < bytes) {
        std::free(pthread_getspecific(kWorkspace));
        void* const memory = std::aligned_alloc(kCacheLine, (bytes + kCacheLine - 1) / kCacheLine * kCacheLine);
        if (!memory) {
            std::fprintf(stderr, "kvengine: no memory for %zu bytes of a product's rows\n", bytes);
            std::abort();
        }
        pthread_setspecific(kWorkspace, memory);
        held = bytes;
    }
    return pthread_getspecific(kWorkspace);
}

// Adds the addend to columns [begin, end) of the product, of which there are a multiple of kTogether.
inline void add(const Operands& given, int64_t begin, int64_t end) {
    for (int64_t row = 0; row < given.count; row++)
        for (int64_t at = row * given.columns + begin; at < row * given.columns + end; at += kTogether)
            _mm256_storeu_ps(given.output + at,
                             _mm256_add_ps(_mm256_loadu_ps(given.output + at), _mm256_loadu_ps(given.addend + at)));
}

// The product with a matrix of which kTogether columns are interleaved, in tiles of `tile_bytes`: one block of each, by
// multiply(tiles, columns, rows, count, blocks, output, stride, kept). In `rows` each block's of `most` rows at a time lie
// together, as Row::take makes them of 32 values. `kept` is memory with `kept_bytes` for each block of elements.
template <class Row, class Multiply>
void multiply_interleaved(const char* destination, int threads, Product* product, int64_t most, int64_t tile_bytes,
                          int64_t kept_bytes, const Multiply& multiply) {
    const Operands given(destination, product);
    const int64_t blocks = given.elements / kBlock;
    // Each thread makes its own: to share them costs a barrier.
    char* const kept = (char*)workspace(blocks * (kept_bytes + given.count * sizeof(Row)));
    Row* const rows = (Row*)(kept + blocks * kept_bytes);
    lay_together(given, most, [&](const float* values, int64_t place) { rows[place].take(values); });
    share_columns(product, threads, given.columns, 4 * kTogether, [&](int64_t begin, int64_t end) {
        multiply(given.matrix + begin / kTogether * blocks * tile_bytes, end - begin, rows, given.count, blocks,
                 given.output + begin, given.columns, kept);
        if (given.addend) add(given, begin, end);
    });
}

}  // namespace
