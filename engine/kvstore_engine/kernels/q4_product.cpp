// Some rows times a q4_0 matrix of which eight columns are interleaved, as a ggml custom operation.
//
// The matrix is what ggml's repacking leaves (block_q4_0x8): of each block of 32 elements eight scales (halves), then
// four bytes of each of the columns at a time, two columns' worth in eight, with signed nibbles. ggml multiplies four rows
// at a time, widens each block again for each four, and pays for the signs with every product. Here a block is widened once
// for 16 rows, the nibbles are taken as unsigned, and 8 times the sum of a row's block is subtracted: two instructions
// for 32 products. With AVX2 16 rows are multiplied in pairs with two tiles, so that what is loaded serves two products.
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

    // The products with one row's block, scaled, a lane for each column.
    __m256 add_to(__m256 sum, __m256i products, const Quantised& row) const {
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_mul_ps(scales, _mm256_set1_ps(row.scale)), sum);
    }
};

__m256i four(const Quantised& row, int i) {
    int32_t bytes;
    std::memcpy(&bytes, row.values + 4 * i, 4);
    return _mm256_set1_epi32(bytes);
}

// Sums of pairs in 16 bits to those of a column: eight of at most 2 * 15 * 128 fit into 16 bits.
__m256i corrected(__m256i pairs, const Quantised& row) {
    return _mm256_add_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), _mm256_set1_epi32(row.correction));
}

__m256i products(const Tile& tile, const Quantised& row) {
#if defined(__AVX512VNNI__)
    __m256i sum = _mm256_set1_epi32(row.correction);
    for (int i = 0; i < 8; i++) sum = _mm256_dpbusd_epi32(sum, tile.fours[i], four(row, i));
    return sum;
#else
    __m256i pairs = _mm256_maddubs_epi16(tile.fours[0], four(row, 0));
    for (int i = 1; i < 8; i++) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(tile.fours[i], four(row, i)));
    return corrected(pairs, row);
#endif
}

// Two tiles with two rows' blocks: each of what is loaded is multiplied twice.
void add_pairs(const Tile (&tiles)[2], const Quantised* rows, __m256 (*sums)[2]) {
    __m256i pairs[2][2] = {};
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        for (int r = 0; r < 2; r++) {
            const __m256i bytes = four(rows[r], i);
            for (int t = 0; t < 2; t++) {
                pairs[r][t] = _mm256_add_epi16(pairs[r][t], _mm256_maddubs_epi16(tiles[t].fours[i], bytes));
                __asm__("" : "+x"(pairs[r][t]));  // GCC would compute all products first, and run out of registers
            }
        }
    for (int r = 0; r < 2; r++)
        for (int t = 0; t < 2; t++) sums[r][t] = tiles[t].add_to(sums[r][t], corrected(pairs[r][t], rows[r]), rows[r]);
}

// The columns lie one after another, but each thread leaves out what others multiply.
inline void prefetch_tile(const char* tile) {
    for (int64_t i = 0; i < kTileBytes; i += 64) __builtin_prefetch(tile + kAheadBytes + i);
}

void write_sums(float* output, __m256 sums) {
    _mm256_storeu_ps(output, _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)));
}

// Sixteen columns, whose tiles begin at `tiles`, times kRows rows of which each block's lie together in `rows`.
void multiply_pairs(const char* tiles, const Quantised* rows, int64_t blocks, float* output, int64_t stride) {
    const int64_t second = blocks * kTileBytes;
    __m256 sums[kRows][2];
    for (auto& pair : sums) pair[0] = pair[1] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks; block++, tiles += kTileBytes, rows += kRows) {
        prefetch_tile(tiles), prefetch_tile(tiles + second);
        const Tile both[2] = {Tile(tiles), Tile(tiles + second)};
        for (int r = 0; r < kRows; r += 2) add_pairs(both, rows + r, sums + r);
    }
    for (int r = 0; r < kRows; r++)
        for (int t = 0; t < 2; t++) write_sums(output + r * stride + t * kTogether, sums[r][t]);
}

// Eight columns, whose tiles begin at `tiles`, times `count` rows of which each block's lie together in `rows`.
void multiply_eight(const char* tiles, const Quantised* rows, int64_t count, int64_t blocks, float* output, int64_t stride) {
    __m256 sums[kRows];
    for (int64_t r = 0; r < count; r++) sums[r] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks; block++, tiles += kTileBytes, rows += count) {
        prefetch_tile(tiles);
        const Tile tile(tiles);
        for (int64_t r = 0; r < count; r++) sums[r] = tile.add_to(sums[r], products(tile, rows[r]), rows[r]);
    }
    for (int64_t r = 0; r < count; r++) write_sums(output + r * stride, sums[r]);
}

void multiply(const char* tiles, int64_t columns, const Quantised* rows, int64_t count, int64_t blocks, float* output,
              int64_t stride) {
    int64_t column = 0;
    const auto at = [&] { return tiles + column / kTogether * blocks * kTileBytes; };
#if !defined(__AVX512VNNI__)
    if (count == kRows)
        for (; column + 2 * kTogether <= columns; column += 2 * kTogether)
            multiply_pairs(at(), rows, blocks, output + column, stride);
#endif
    for (; column < columns; column += kTogether) multiply_eight(at(), rows, count, blocks, output + column, stride);
}

}  // namespace

// ggml_custom_op_t, see Operands; the matrix has a multiple of eight columns. `userdata` is a Product.
extern "C" void KV_PRODUCT(const char* destination, int, int threads, void* userdata) {
    multiply_interleaved<Quantised>(destination, threads, (Product*)userdata, kRows, kTileBytes, multiply);
}
