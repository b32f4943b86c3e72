// Some rows times a q4_0 matrix of which eight columns are interleaved, as a ggml custom operation.
//
// The matrix is what ggml's repacking leaves (block_q4_0x8): of each block of 32 elements eight scales (halves), then
// four bytes of each of the columns at a time, two columns' worth in eight, with signed nibbles. ggml multiplies four rows
// at a time, widens each block again for each four, and pays for the signs with every product. Here a block is widened once
// for 16 rows, the nibbles are taken as unsigned, and 8 times the sum of a row's block is subtracted: two instructions
// for 32 products.
//
// Sums within a block are whole numbers, and blocks are added one after another with ggml's own rounding, so that a row's
// product has the same bits whichever multiplied it, and for any number of rows. x86 with AVX2 only.

#include "product.h"

namespace {

constexpr int64_t kTileBytes = 16 + 16 * 8;  // eight scales, the columns' nibbles
constexpr int64_t kRows = 16;                // for which a tile is widened once
constexpr int64_t kAheadBytes = 2048;

struct Quantised {
    int8_t values[kBlock];
    float scale;
    int32_t correction;  // -8 times the sum of the values: nibbles are 8 too large

    void take(const float* given) {
        scale = quantise(given, values);
        correction = -8 * sum_of_bytes(values);
    }
};

// A tile, ready to be multiplied with the same block of several rows.
struct Tile {
    __m256i fours[8];  // fours[i]: elements 4 * i to 4 * i + 3 of columns 0 4 1 5 2 6 3 7, plus 8
    __m256 scales;     // in the same order

    explicit Tile(const char* tile) {
        const __m256i sign = _mm256_set1_epi8(char(0x88)), nibble = _mm256_set1_epi8(15);
        for (int half = 0; half < 2; half++) {
            const __m256i* const bytes = (const __m256i*)(tile + 16 + 64 * half);
            const __m256i left = _mm256_xor_si256(_mm256_loadu_si256(bytes), sign);
            const __m256i right = _mm256_xor_si256(_mm256_loadu_si256(bytes + 1), sign);
            const __m256i even = _mm256_blend_epi32(left, _mm256_shuffle_epi32(right, 0xB1), 0xAA);
            const __m256i odd = _mm256_blend_epi32(_mm256_shuffle_epi32(left, 0xB1), right, 0xAA);
            fours[2 * half] = _mm256_and_si256(even, nibble);
            fours[2 * half + 1] = _mm256_and_si256(odd, nibble);
            fours[2 * half + 4] = _mm256_and_si256(_mm256_srli_epi16(even, 4), nibble);
            fours[2 * half + 5] = _mm256_and_si256(_mm256_srli_epi16(odd, 4), nibble);
        }
        const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
        scales = _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)tile), order));
    }

    // The sums of products with one row's block, a lane for each column.
    __m256 times(const Quantised& row) const {
        const auto four = [&](int i) {
            int32_t bytes;
            std::memcpy(&bytes, row.values + 4 * i, 4);
            return _mm256_set1_epi32(bytes);
        };
#if defined(__AVX512VNNI__)
        __m256i sum = _mm256_set1_epi32(row.correction);
        for (int i = 0; i < 8; i++) sum = _mm256_dpbusd_epi32(sum, fours[i], four(i));
#else
        __m256i pairs = _mm256_maddubs_epi16(fours[0], four(0));  // eight of at most 2 * 15 * 128: 16 bits hold them
        for (int i = 1; i < 8; i++) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(fours[i], four(i)));
        const __m256i plain = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        const __m256i sum = _mm256_add_epi32(plain, _mm256_set1_epi32(row.correction));
#endif
        return _mm256_cvtepi32_ps(sum);
    }
};

// Eight columns, whose tiles begin at `tiles`, times `count` rows of which each block's lie together in `rows`.
void multiply(const char* tiles, const Quantised* rows, int64_t count, int64_t blocks, float* output, int64_t stride) {
    __m256 sums[kRows];
    for (int64_t r = 0; r < count; r++) sums[r] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks; block++, tiles += kTileBytes, rows += count) {
        // The columns lie one after another, but each thread leaves out what others multiply.
        for (int64_t i = 0; i < kTileBytes; i += 64) __builtin_prefetch(tiles + kAheadBytes + i);
        const Tile tile(tiles);
        for (int64_t r = 0; r < count; r++) {
            const __m256 scales = _mm256_mul_ps(tile.scales, _mm256_set1_ps(rows[r].scale));
            sums[r] = _mm256_fmadd_ps(tile.times(rows[r]), scales, sums[r]);
        }
    }
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for (int64_t r = 0; r < count; r++)
        _mm256_storeu_ps(output + r * stride, _mm256_permutevar8x32_ps(sums[r], order));
}

}  // namespace

// ggml_custom_op_t, see Operands; the matrix has a multiple of eight columns. `userdata` is a Product.
extern "C" void KV_PRODUCT(const char* destination, int, int threads, void* userdata) {
    multiply_interleaved<Quantised>(destination, threads, (Product*)userdata, kRows, kTileBytes, multiply);
}
