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

namespace {

constexpr int64_t kTileBytes = 16 + 32 * 8;  // eight scales, the columns' values
constexpr int64_t kRows = 8;                 // whose sums registers hold
constexpr int64_t kAheadBytes = 4096;

// Elements 4 * i to 4 * i + 3 of eight columns, and of one row in every lane, are multiplied and added up by lanes.
#if defined(__AVX512VNNI__)
struct Row {
    int8_t values[kBlock];
    int32_t correction;  // -128 times the sum of the values: weights are taken 128 too large
    float scale;

    void take(const float* given) {
        scale = quantise(given, values);
        correction = -128 * sum_of_bytes(values);
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

    void take(const float* given) {
        alignas(32) int8_t quantised[kBlock];
        scale = quantise(given, quantised);
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
        sum = _mm256_add_epi32(sum, products);
        __asm__("" : "+x"(sum));  // GCC would compute all rows' products first, and run out of registers
        return sum;
    }
};
#endif

// Eight columns, whose tiles begin at `tiles`, times Count rows of which each block's lie together in `rows`.
template <int Count>
void multiply_rows(const char* tiles, const Row* rows, int64_t blocks, float* output, int64_t stride) {
    __m256 totals[Count];
    for (int r = 0; r < Count; r++) totals[r] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks; block++, tiles += kTileBytes, rows += Count) {
        // The columns lie one after another, but each thread leaves out what others multiply.
        for (int64_t i = 0; i < kTileBytes; i += 64) __builtin_prefetch(tiles + kAheadBytes + i);
        __m256i sums[Count];
        for (int r = 0; r < Count; r++) sums[r] = rows[r].start();
#pragma GCC unroll 8
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
constexpr Multiply* kMultiply[kRows] = {multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,
                                        multiply_rows<5>, multiply_rows<6>, multiply_rows<7>, multiply_rows<8>};

void multiply(const char* tiles, int64_t columns, const Row* rows, int64_t count, int64_t blocks, float* output,
              int64_t stride, void*) {
    for (int64_t row = 0; row < count; row += kRows)
        for (int64_t column = 0; column < columns; column += kTogether)
            kMultiply[std::min(kRows, count - row) - 1](tiles + column / kTogether * blocks * kTileBytes,
                                                        rows + row * blocks, blocks, output + row * stride + column,
                                                        stride);
}

}  // namespace

// ggml_custom_op_t, see Operands; the matrix has a multiple of eight columns. `userdata` is a Product.
extern "C" void KV_PRODUCT(const char* destination, int, int threads, void* userdata) {
    multiply_interleaved<Row>(destination, threads, (Product*)userdata, kRows, kTileBytes, 0, multiply);
}
