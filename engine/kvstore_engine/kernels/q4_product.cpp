// Some rows times a q4_0 matrix of which eight columns are interleaved, as a ggml custom operation.
//
// The matrix is what ggml's repacking leaves (block_q4_0x8): of each block of 32 elements eight scales (halves), then
// four bytes of each of the columns at a time, two columns' worth in eight, with signed nibbles. ggml multiplies four rows
// at a time, widens each block again for each four, and pays for the signs with every product. Here a block is widened once
// for 16 rows or all, nibbles are taken as unsigned, and 8 times the sum of a row's block is subtracted: two instructions
// for 32 products. Four rows at a time are multiplied with two tiles, so that what is loaded serves several products.
//
// Sums within a block are whole numbers, and blocks are added one after another with ggml's own rounding, so that a row's
// product has the same bits whichever multiplied it, and for any number of rows. x86 with AVX2 only.

#include "product.h"

namespace {

constexpr int64_t kTileBytes = 16 + 16 * 8;  // eight scales, the columns' nibbles
constexpr int64_t kRows = 16;                // whose sums a first-level cache holds
constexpr int64_t kFour = 4;                 // rows whose sums of a block registers hold, for two tiles
constexpr int64_t kPaired = 12, kKept = 64;  // rows from which on two tiles at a time pay, and widening all first
constexpr int64_t kAheadBytes = 2048;

struct Quantised {
    int8_t values[kBlock];
    float scale;
    int32_t correction;  // what sums of products begin with: -8 times the sum of the values, as nibbles are 8 too large

    void take(const float* given) {
        scale = quantise(given, values);
#if defined(__AVX512VNNI__)
        correction = -8 * sum_of_bytes(values);
#else
        // Two numbers of 16 bits, of every other pair of elements.
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i*)values));
        __m128i sums = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4E));
        sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xB1));
        correction = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), _mm_slli_epi16(sums, 3)));
#endif
    }
};

// A tile, ready to be multiplied with the same block of several rows.
struct Tile {
    __m256i fours[8];  // fours[i]: elements 4 * i to 4 * i + 3 of columns 0 4 1 5 2 6 3 7, plus 8
    __m256 scales;     // in the same order

    void take(const char* tile) {
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

// Sums with four more products for each column. With AVX2 they are sums of pairs in 16 bits: eight and the correction
// are 16 products with -8 to 7, which fit, whatever overflows on the way.
#if defined(__AVX512VNNI__)
__m256i added(__m256i sums, __m256i fours, __m256i bytes) { return _mm256_dpbusd_epi32(sums, fours, bytes); }
__m256i whole(__m256i sums) { return sums; }
#else
__m256i added(__m256i sums, __m256i fours, __m256i bytes) {
    __m256i pairs;  // GCC, left to itself, computes all products first, and runs out of registers
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(pairs) : "x"(fours), "x"(bytes));
    return sums;
}
__m256i whole(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
#endif

// The products of Tiles tiles with Rows rows' blocks, added to `sums`.
template <int Rows, int Tiles>
void add_products(const Tile* tiles, const Quantised* rows, __m256 (*sums)[Tiles]) {
    __m256i products[Rows][Tiles];
    for (int r = 0; r < Rows; r++)
        for (int t = 0; t < Tiles; t++) products[r][t] = _mm256_set1_epi32(rows[r].correction);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        for (int r = 0; r < Rows; r++) {
            const __m256i bytes = four(rows[r], i);
            for (int t = 0; t < Tiles; t++) products[r][t] = added(products[r][t], tiles[t].fours[i], bytes);
        }
    for (int r = 0; r < Rows; r++)
        for (int t = 0; t < Tiles; t++) sums[r][t] = tiles[t].add_to(sums[r][t], whole(products[r][t]), rows[r]);
}

void write_sums(float* output, __m256 sums) {
    _mm256_storeu_ps(output, _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)));
}

// The tiles of a block of Tiles times eight columns: each eight's tiles are `strip` bytes, then come the next eight's.
template <int Tiles>
void widen(const char* tiles, int64_t block, int64_t strip, Tile* widened) {
    const int64_t at = block * kTileBytes, ahead = at + kAheadBytes;
    for (int t = 0; t < Tiles; t++, tiles += strip) {
        // The columns lie one after another, but each thread leaves out what others multiply.
        const char* const next = tiles + ahead + (ahead < strip ? 0 : (Tiles - 1) * strip);
        for (int64_t i = 0; i < kTileBytes; i += 64) __builtin_prefetch(next + i);
        widened[t].take(tiles + at);
    }
}

// Tiles times eight columns times `count` rows, at most kRows, of which each block's lie together in `rows`.
// tiles_of(block, memory) returns the block's tiles, which may be in `memory`.
template <int Tiles, class TilesOf>
void multiply_rows(const TilesOf& tiles_of, const Quantised* rows, int64_t count, int64_t blocks, float* output,
                   int64_t stride) {
    __m256 sums[kRows][Tiles];
    for (int64_t r = 0; r < count; r++) {
        __builtin_prefetch(output + r * stride, 1);  // rows far apart, written at the end
        for (int t = 0; t < Tiles; t++) sums[r][t] = _mm256_setzero_ps();
    }
    for (int64_t block = 0; block < blocks; block++, rows += count) {
        Tile memory[Tiles];
        const Tile* const tiles = tiles_of(block, memory);
        int64_t r = 0;
        if (Tiles > 1)
            for (; r + kFour <= count; r += kFour) add_products<kFour>(tiles, rows + r, sums + r);
        for (; r < count; r++) add_products<1>(tiles, rows + r, sums + r);
    }
    for (int64_t r = 0; r < count; r++)
        for (int t = 0; t < Tiles; t++) write_sums(output + r * stride + t * kTogether, sums[r][t]);
}

// The same for any `count`. For kKept rows and more all tiles are widened first, into `kept`.
template <int Tiles>
void multiply_columns(const char* tiles, const Quantised* rows, int64_t count, int64_t blocks, float* output,
                      int64_t stride, Tile* kept) {
    const int64_t strip = blocks * kTileBytes;
    const auto widened = [&](int64_t block, Tile* memory) {
        widen<Tiles>(tiles, block, strip, memory);
        return memory;
    };
    const bool keeps = count >= kKept;
    for (int64_t block = 0; keeps && block < blocks; block++) widened(block, kept + Tiles * block);
    const auto before = [&](int64_t block, Tile*) { return kept + Tiles * block; };
    for (int64_t row = 0; row < count; row += kRows) {
        const auto multiplied = [&](const auto& tiles_of) {
            multiply_rows<Tiles>(tiles_of, rows + row * blocks, std::min(kRows, count - row), blocks,
                                 output + row * stride, stride);
        };
        keeps ? multiplied(before) : multiplied(widened);
    }
}

void multiply(const char* tiles, int64_t columns, const Quantised* rows, int64_t count, int64_t blocks, float* output,
              int64_t stride, void* kept) {
    int64_t column = 0;
    const auto multiplied = [&](auto together) {
        for (; column + together * kTogether <= columns; column += together * kTogether)
            multiply_columns<together>(tiles + column / kTogether * blocks * kTileBytes, rows, count, blocks,
                                       output + column, stride, (Tile*)kept);
    };
    if (count >= kPaired) multiplied(std::integral_constant<int, 2>());
    multiplied(std::integral_constant<int, 1>());
}

}  // namespace

// ggml_custom_op_t, see Operands; the matrix has a multiple of eight columns. `userdata` is a Product.
extern "C" void KV_PRODUCT(const char* destination, int, int threads, void* userdata) {
    multiply_interleaved<Quantised>(destination, threads, (Product*)userdata, kRows, kTileBytes, 2 * sizeof(Tile), multiply);
}
