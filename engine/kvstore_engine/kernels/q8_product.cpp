// Some rows times a q8_0 matrix of which eight columns are interleaved, as a ggml custom operation.
//
// The matrix is what `interleaving.interleave_q8_0` makes: of each block of 32 elements eight scales (halves), then four
// bytes of each of the columns at a time. So a lane belongs to a column from the first product to the last sum: a block
// is converted and scaled once for eight columns, where ggml's layout, a column in all lanes, needs it for each. Up to
// eight rows' sums of a block stay in registers; with AVX2 bytes are multiplied as 16-bit numbers, of which one
// instruction multiplies and adds pairs: 35 instructions for 256 products, besides loads.
//
// Sums within a block are whole numbers, and blocks are added one after another, each in one rounding, so that a row's
// product has the same bits for any number of rows and with any instruction set. (ggml adds the blocks in eight lanes,
// then the lanes: its last bits differ.) x86 with AVX2 only.

#include "product.h"

#include <vector>

namespace {

constexpr int64_t kTogether = 8;             // columns that are interleaved
constexpr int64_t kTileBytes = 16 + 32 * 8;  // their scales, their values: one block of each
constexpr int64_t kRows = 8;                 // whose sums registers hold
constexpr int64_t kPortion = 4 * kTogether;
constexpr int64_t kAheadBytes = 4096;

// Elements 4 * i to 4 * i + 3 of eight columns, and of one row in every lane, are multiplied and added up by lanes.
#if defined(__AVX512VNNI__)
struct Row {
    int8_t values[kBlock];
    int32_t correction;  // -128 times the sum of the values: weights are taken 128 too large
    float scale;

    void take(const int8_t* quantised) {
        std::memcpy(values, quantised, kBlock);
        __m256i sums = sums_of_four(_mm256_loadu_si256((const __m256i*)values));
        __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
        correction = -128 * (_mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 1));
    }
    __m256i start() const { return _mm256_set1_epi32(correction); }
};
struct Weights {
    __m256i values;  // plus 128, unsigned

    explicit Weights(__m256i bytes) : values(_mm256_xor_si256(bytes, _mm256_set1_epi8(char(0x80)))) {}
    __m256i add_to(__m256i sum, const Row& row, int i) const {
        int32_t four;
        std::memcpy(&four, row.values + 4 * i, 4);
        return _mm256_dpbusd_epi32(sum, values, _mm256_set1_epi32(four));
    }
};
#else
struct Row {
    int16_t values[kBlock];  // of each four the first and the third, then the others
    float scale;

    void take(const int8_t* quantised) {
        for (int i = 0; i < kBlock; i += 4) {
            values[i] = quantised[i], values[i + 1] = quantised[i + 2];
            values[i + 2] = quantised[i + 1], values[i + 3] = quantised[i + 3];
        }
    }
    __m256i start() const { return _mm256_setzero_si256(); }
};
struct Weights {
    __m256i even, odd;  // 16 bits each

    explicit Weights(__m256i bytes)
        : even(_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8)), odd(_mm256_srai_epi16(bytes, 8)) {}
    __m256i add_to(__m256i sum, const Row& row, int i) const {
        int32_t first, second;
        std::memcpy(&first, row.values + 4 * i, 4);
        std::memcpy(&second, row.values + 4 * i + 2, 4);
        const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(even, _mm256_set1_epi32(first)),
                                                  _mm256_madd_epi16(odd, _mm256_set1_epi32(second)));
        return _mm256_add_epi32(sum, products);
    }
};
#endif

// Eight columns, whose tiles begin at `tiles`, times Count rows of which each block's lie together in `rows`.
template <int Count>
void multiply(const char* tiles, const Row* rows, int64_t blocks, float* output, int64_t stride) {
    __m256 totals[Count];
    for (int r = 0; r < Count; r++) totals[r] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks; block++, tiles += kTileBytes, rows += Count) {
        // The columns lie one after another, but each thread leaves out what others multiply.
        for (int64_t i = 0; i < kTileBytes; i += 64) __builtin_prefetch(tiles + kAheadBytes + i);
        __m256i sums[Count];
        for (int r = 0; r < Count; r++) sums[r] = rows[r].start();
        for (int i = 0; i < 8; i++) {
            const Weights weights(_mm256_loadu_si256((const __m256i*)(tiles + 16) + i));
            for (int r = 0; r < Count; r++) sums[r] = weights.add_to(sums[r], rows[r], i);
        }
        const __m256 scales = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)tiles));
        for (int r = 0; r < Count; r++)
            totals[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r]),
                                        _mm256_mul_ps(scales, _mm256_set1_ps(rows[r].scale)), totals[r]);
    }
    for (int r = 0; r < Count; r++) _mm256_storeu_ps(output + r * stride, totals[r]);
}

using Multiply = void(const char*, const Row*, int64_t, float*, int64_t);
constexpr Multiply* kMultiply[kRows] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>,
                                        multiply<5>, multiply<6>, multiply<7>, multiply<8>};

}  // namespace

// ggml_custom_op_t, see Operands; the matrix has a multiple of eight columns. `userdata` is a Product.
extern "C" void KV_PRODUCT(const char* destination, int, int threads, void* userdata) {
    Product* const product = (Product*)userdata;
    const Operands given(destination, product);
    const int64_t blocks = given.elements / kBlock;
    thread_local std::vector<Row> rows;  // each thread makes its own: to share them costs a barrier
    rows.resize(given.count * blocks);
    lay_together(given, kRows, [&](const float* values, int64_t, int64_t, int64_t place) {
        alignas(32) int8_t whole[kBlock];
        rows[place].scale = quantise(values, whole);
        rows[place].take(whole);
    });
    share_columns(product, threads, given.columns, kPortion, [&](int64_t begin, int64_t end) {
        for (int64_t row = 0; row < given.count; row += kRows) {
            Multiply* const multiply_rows = kMultiply[std::min(kRows, given.count - row) - 1];
            for (int64_t column = begin; column < end; column += kTogether)
                multiply_rows(given.matrix + column / kTogether * blocks * kTileBytes, rows.data() + row * blocks, blocks,
                              given.output + row * given.columns + column, given.columns);
        }
    });
}
