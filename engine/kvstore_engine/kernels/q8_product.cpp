// Some rows times a q8_0 matrix, as a ggml custom operation.
//
// ggml multiplies 2 to 16 rows with matrices that come from memory at a fifth of the memory's speed: its tiles walk over
// all of the matrix again and again. Measured with ggml 0.26, 576 x 49,152 (30 MB), AVX2, one thread: 1 row 1.1 ms, 4
// rows 7.1 ms. Here threads take 32 rows of the matrix at a time, which stay in the first-level cache for all rows of the
// step: 4 rows 2.7 ms. A decode step of a 135M q8_0 model with 4 sequences takes 15 ms instead of 34.
//
// Sums are formed in the order of ggml's own kernels for AVX2 (ggml_vec_dot_q8_0_q8_0), so that a row's product has the
// same bits whichever multiplied it. x86 only: elsewhere the address is null and ggml's product is used.

#include "elements.h"
#include "layout.h"

#include <vector>

namespace {

constexpr int64_t kBlock = 32, kBlockBytes = 34;
constexpr int64_t kChunkRows = 32;

// One row of the step as ggml quantises it (quantize_row_q8_0), its blocks' scales apart.
struct Quantised {
    alignas(32) int8_t values[kBlock];
    alignas(32) int32_t correction[8];  // with VNNI: -128 times the sums of four neighbouring values
    float scale;
};

struct Rows {
    const Quantised* first;  // [rows][blocks]
    int64_t count, blocks;
    const Quantised& at(int64_t row, int64_t block) const { return first[row * blocks + block]; }
};

void quantise(const float* values, Quantised& block) {
    float largest = 0;
    for (int i = 0; i < kBlock; i++) largest = std::max(largest, std::fabs(values[i]));
    const float inverse = largest != 0 ? 127.f / largest : 0;
    for (int i = 0; i < kBlock; i += 8) {
        const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(values + i), _mm256_set1_ps(inverse));
        alignas(32) int32_t whole[8];
        _mm256_store_si256((__m256i*)whole, _mm256_cvtps_epi32(_mm256_round_ps(scaled, _MM_ROUND_NEAREST)));
        for (int k = 0; k < 8; k++) block.values[i + k] = int8_t(whole[k]);
    }
    for (int i = 0; i < 8; i++) {
        const int8_t* const four = block.values + 4 * i;
        block.correction[i] = -128 * (four[0] + four[1] + four[2] + four[3]);
    }
    block.scale = half_to_float(_cvtss_sh(largest / 127.f, _MM_FROUND_TO_NEAREST_INT));
}

// A block of the matrix, ready to be multiplied with blocks of several rows.
struct Weights {
    __m256i values, prepared;
    __m256 scale;

    explicit Weights(const char* block) {
        values = _mm256_loadu_si256((const __m256i*)(block + 2));
        scale = _mm256_set1_ps(scale_at(block));
#if defined(__AVX512VNNI__)
        prepared = _mm256_xor_si256(values, _mm256_set1_epi8(char(0x80)));  // plus 128, unsigned
#else
        prepared = _mm256_sign_epi8(values, values);
#endif
    }
    // Lane i: the products of elements 4 * i to 4 * i + 3, added.
    __m256i times(const Quantised& row) const {
#if defined(__AVX512VNNI__)
        const __m256i correction = _mm256_load_si256((const __m256i*)row.correction);
        return _mm256_dpbusd_epi32(correction, prepared, _mm256_load_si256((const __m256i*)row.values));
#else
        const __m256i theirs = _mm256_sign_epi8(_mm256_load_si256((const __m256i*)row.values), values);
        return _mm256_madd_epi16(_mm256_maddubs_epi16(prepared, theirs), _mm256_set1_epi16(1));
#endif
    }
};

inline float sum_of(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// Columns rows of the matrix, from `matrix` on, times Count rows of the step, from `row` on.
template <int Columns, int Count>
void multiply(const char* matrix, const Rows& rows, int64_t row, float* output, int64_t stride) {
    __m256 sum[Columns][Count];
    for (int c = 0; c < Columns; c++)
        for (int r = 0; r < Count; r++) sum[c][r] = _mm256_setzero_ps();
    for (int64_t block = 0; block < rows.blocks; block++)
        for (int c = 0; c < Columns; c++) {
            const Weights weights(matrix + (c * rows.blocks + block) * kBlockBytes);
            for (int r = 0; r < Count; r++) {
                const Quantised& other = rows.at(row + r, block);
                const __m256 scale = _mm256_mul_ps(weights.scale, _mm256_set1_ps(other.scale));
                sum[c][r] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(weights.times(other)), sum[c][r]);
            }
        }
    for (int c = 0; c < Columns; c++)
        for (int r = 0; r < Count; r++) output[(row + r) * stride + c] = sum_of(sum[c][r]);
}

template <int Columns>
void multiply_rows(const char* matrix, const Rows& rows, float* output, int64_t stride) {
    int64_t row = 0;
    for (; row + 4 <= rows.count; row += 4) multiply<Columns, 4>(matrix, rows, row, output, stride);
    for (; row + 2 <= rows.count; row += 2) multiply<Columns, 2>(matrix, rows, row, output, stride);
    for (; row < rows.count; row++) multiply<Columns, 1>(matrix, rows, row, output, stride);
}

}  // namespace

// ggml_custom_op_t. Source 0: f32 [rows][elements], contiguous; source 1: the matrix, q8_0 [columns][elements];
// destination: f32 [rows][columns]. `userdata` is a Product.
extern "C" void KV_PRODUCT(const char* destination, int, int threads, void* userdata) {
    Product* const product = (Product*)userdata;
    const auto source = [&](int index) { return ((const char* const*)(destination + product->source_offset))[index]; };
    const auto data = [&](const char* tensor) { return *(char* const*)(tensor + product->data_offset); };
    const auto extent = [&](const char* tensor, int axis) {
        return ((const int64_t*)(tensor + product->extent_offset))[axis];
    };
    const int64_t elements = extent(source(1), 0), columns = extent(source(1), 1), count = extent(source(0), 1);
    const float* const values = (const float*)data(source(0));
    const char* const matrix = data(source(1));
    float* const output = (float*)data(destination);
    thread_local std::vector<Quantised> quantised;  // each thread makes its own: to share them costs a barrier
    quantised.resize(count * elements / kBlock);
    for (size_t i = 0; i < quantised.size(); i++) quantise(values + i * kBlock, quantised[i]);
    const Rows rows{quantised.data(), count, elements / kBlock};
    const int64_t row_bytes = rows.blocks * kBlockBytes;
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&product->next_column, kChunkRows, __ATOMIC_RELAXED);
        if (begin >= columns) break;
        const int64_t end = std::min(begin + kChunkRows, columns);
        int64_t column = begin;
        for (; column + 2 <= end; column += 2) {
            // A few rows on: the hardware follows the stream, but starts anew with each chunk.
            for (int64_t i = 0; i < 2 * row_bytes; i += 64)
                __builtin_prefetch(matrix + std::min((column + 6) * row_bytes + i, columns * row_bytes - 1));
            multiply_rows<2>(matrix + column * row_bytes, rows, output + column, columns);
        }
        for (; column < end; column++) multiply_rows<1>(matrix + column * row_bytes, rows, output + column, columns);
    }
    // Whoever leaves last makes the counters ready for the next product, which starts behind a barrier.
    if (__atomic_add_fetch(&product->finished, 1, __ATOMIC_ACQ_REL) == threads) {
        product->next_column = 0;
        product->finished = 0;
    }
}
