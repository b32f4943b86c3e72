// Some rows times a q8_0 matrix, as a ggml custom operation.
//
// ggml multiplies 2 to 16 rows with matrices that come from memory at a fifth of the memory's speed: its tiles walk over
// all of the matrix again and again. Here a thread walks over its columns once and multiplies a few of them at a time
// with up to eight rows, whose sums stay in registers; with AVX2 as 16-bit numbers, of which one instruction multiplies
// and adds pairs.
//
// Sums are formed in the order of ggml's own kernels for AVX2 (ggml_vec_dot_q8_0_q8_0), so that a row's product has the
// same bits whichever multiplied it. x86 only: elsewhere the address is null and ggml's product is used.

#include "product.h"

#include <vector>

namespace {

constexpr int64_t kBlockBytes = 34;
constexpr int64_t kPortion = 32;
constexpr int64_t kRows = 8;    // whose blocks lie together, and whose sums registers hold
constexpr int64_t kScales = 8;  // blocks whose scales are multiplied at once
constexpr int64_t kAheadBytes = 4096;

// The elements of a block that a lane adds up are 4 * i to 4 * i + 3, with any instruction set.
#if defined(__AVX512VNNI__)
struct Block {
    __m256i values, correction;  // correction: -128 times the sums of four

    explicit Block(__m256i bytes) : values(bytes) {
        correction = _mm256_slli_epi32(_mm256_sub_epi32(_mm256_setzero_si256(), sums_of_four(bytes)), 7);
    }
};
struct Weights {
    __m256i values;  // plus 128, unsigned

    explicit Weights(__m256i bytes) : values(_mm256_xor_si256(bytes, _mm256_set1_epi8(char(0x80)))) {}
    __m256i times(const Block& row) const { return _mm256_dpbusd_epi32(row.correction, values, row.values); }
};
#else
struct Block {
    __m256i even, odd;  // 16 bits each: lane i has elements 4 * i and 4 * i + 2 in `even`, the ones after them in `odd`

    explicit Block(__m256i bytes)
        : even(_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8)), odd(_mm256_srai_epi16(bytes, 8)) {}
};
struct Weights : Block {
    using Block::Block;
    __m256i times(const Block& row) const {
        return _mm256_add_epi32(_mm256_madd_epi16(even, row.even), _mm256_madd_epi16(odd, row.odd));
    }
};
#endif

// The rows of a step, kRows at a time; of these the same block of each row together.
struct Rows {
    std::vector<Block> blocks;
    std::vector<float> scales;  // [row][padded]
    int64_t padded;             // blocks of a row, rounded up to whole vectors of scales
};

// Rows whose blocks lie together.
struct Tile {
    const Block* blocks;
    const float* scales;
    int64_t padded;
    float* output;  // the first row's
    int64_t stride;
};

// Each thread makes its own: to share them costs a barrier.
const Rows& quantised_rows(const Operands& given) {
    thread_local Rows rows;
    const int64_t blocks = given.elements / kBlock;
    rows.padded = (blocks + kScales - 1) / kScales * kScales;
    rows.blocks.resize(given.count * blocks, Block(_mm256_setzero_si256()));
    rows.scales.resize(given.count * rows.padded);
    lay_together(given, kRows, [](const float* values, int64_t row, int64_t block, int64_t place) {
        alignas(32) int8_t whole[kBlock];
        rows.scales[row * rows.padded + block] = quantise(values, whole);
        rows.blocks[place] = Block(_mm256_load_si256((const __m256i*)whole));
    });
    return rows;
}

inline float sum_of(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// The scales of `count` blocks, then zeros.
inline __m256 scales_at(const char* blocks, int64_t count) {
    alignas(16) uint16_t halves[kScales] = {};
    const auto take = [&](int64_t i) { std::memcpy(halves + i, blocks + i * kBlockBytes, 2); };
    if (count == kScales)  // a count that the compiler knows: no loop
        for (int64_t i = 0; i < kScales; i++) take(i);
    else
        for (int64_t i = 0; i < count; i++) take(i);
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i*)halves));
}

// Columns rows of the matrix, from `matrix` on, times Rows rows of the step; the products' first is output[0].
template <int Rows, int Columns>
void multiply(const char* matrix, int64_t blocks, const Tile& tile, float* output) {
    __m256 sums[Rows][Columns];
    alignas(32) float scales[Rows][Columns][kScales];
    for (int r = 0; r < Rows; r++)
        for (int c = 0; c < Columns; c++) sums[r][c] = _mm256_setzero_ps();
    const Block* row = tile.blocks;
    for (int64_t begin = 0; begin < blocks; begin += kScales) {
        const int64_t count = std::min(kScales, blocks - begin);
        for (int c = 0; c < Columns; c++) {
            const char* const at = matrix + (c * blocks + begin) * kBlockBytes;
            // Across pages, which the processor's own fetching ahead does not cross.
            for (int64_t i = 0; i < count * kBlockBytes; i += 64) __builtin_prefetch(at + kAheadBytes + i);
            const __m256 theirs = scales_at(at, count);
            for (int r = 0; r < Rows; r++) {
                const __m256 mine = _mm256_loadu_ps(tile.scales + r * tile.padded + begin);
                _mm256_store_ps(scales[r][c], _mm256_mul_ps(theirs, mine));
            }
        }
        const char* values = matrix + begin * kBlockBytes + 2;
        for (int64_t block = 0; block < count; block++, row += Rows, values += kBlockBytes)
            for (int c = 0; c < Columns; c++) {
                const Weights weights(_mm256_loadu_si256((const __m256i*)(values + c * blocks * kBlockBytes)));
                for (int r = 0; r < Rows; r++)
                    sums[r][c] = _mm256_fmadd_ps(_mm256_set1_ps(scales[r][c][block]),
                                                 _mm256_cvtepi32_ps(weights.times(row[r])), sums[r][c]);
            }
    }
    for (int r = 0; r < Rows; r++)
        for (int c = 0; c < Columns; c++) output[r * tile.stride + c] = sum_of(sums[r][c]);
}

// Columns [begin, end) times Rows rows, Columns at a time.
template <int Rows, int Columns>
void multiply(const char* matrix, int64_t blocks, const Tile& tile, int64_t begin, int64_t end) {
    const auto at = [&](int64_t column) { return matrix + column * blocks * kBlockBytes; };
    for (; begin + Columns <= end; begin += Columns)
        multiply<Rows, Columns>(at(begin), blocks, tile, tile.output + begin);
    for (; begin < end; begin++) multiply<Rows, 1>(at(begin), blocks, tile, tile.output + begin);
}

// For each number of rows. As many columns at a time as leave the sums, and what is multiplied, in 16 registers.
using Multiply = void(const char*, int64_t, const Tile&, int64_t, int64_t);
constexpr Multiply* kMultiply[kRows] = {multiply<1, 4>, multiply<2, 4>, multiply<3, 2>, multiply<4, 2>,
                                        multiply<5, 1>, multiply<6, 1>, multiply<7, 1>, multiply<8, 1>};

}  // namespace

// ggml_custom_op_t, see Operands; the matrix is q8_0 [columns][elements]. `userdata` is a Product.
extern "C" void KV_PRODUCT(const char* destination, int, int threads, void* userdata) {
    Product* const product = (Product*)userdata;
    const Operands given(destination, product);
    const Rows& rows = quantised_rows(given);
    const int64_t blocks = given.elements / kBlock;
    share_columns(product, threads, given.columns, kPortion, [&](int64_t begin, int64_t end) {
        for (int64_t row = 0; row < given.count; row += kRows) {
            const Tile tile{rows.blocks.data() + row * blocks, rows.scales.data() + row * rows.padded, rows.padded,
                            given.output + row * given.columns, given.columns};
            kMultiply[std::min(kRows, given.count - row) - 1](given.matrix, blocks, tile, begin, end);
        }
    });
}
