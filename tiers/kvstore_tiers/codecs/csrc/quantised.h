// Layers of K and V as numbers of 8 or 4 bits and back, for quantised.py, which describes the form. NumPy does the same
// in quantised_arrays.py, to the bit: operations are never fused, and sums go over tokens in order, each channel alone.
#pragma once
#include "numbers.h"

namespace {

struct Tensor {  // as shapes.py has it, and the bits that a number keeps: 8, 4, or 0 for all
  int64_t kind, type, offset, tokens, heads, width, token_stride, head_stride, bits;
  int64_t number_bytes() const { return type == kF32 ? 4 : 2; }
};

template <int kBits>
constexpr int64_t kGroup = kBits == 8 ? 64 : 32;  // tokens that share the scales of K

constexpr float kFar = 0.4f;  // of the largest number: what is below needs no clamp

struct Places {  // of scales, offsets and small numbers in a coded tensor
  int64_t rows, columns, scales_bytes, row_bytes;
  Places(int bits, const Tensor& t, int number_bytes) {
    int64_t channels = t.heads * t.width, group = bits == 8 ? 64 : 32;
    if (t.kind == 1) {
      rows = (t.tokens + group - 1) / group, columns = channels;
    } else {
      rows = t.tokens, columns = bits == 8 ? 1 : (channels + 31) / 32;
    }
    scales_bytes = rows * columns * number_bytes;
    row_bytes = bits == 8 ? channels : (channels + 1) / 2;
  }
  int64_t numbers_at(int bits) const { return bits == 8 ? scales_bytes : 2 * scales_bytes; }
  int64_t nbytes(int bits, int64_t tokens) const { return numbers_at(bits) + tokens * row_bytes; }
};

// The bytes of a coded tensor.
inline int64_t coded_bytes_of(const Tensor& t) {
  const int bits = (int)t.bits, number_bytes = (int)t.number_bytes();
  return bits ? Places(bits, t, number_bytes).nbytes(bits, t.tokens) : t.tokens * t.heads * t.width * number_bytes;
}

inline float top_of(Floats numbers) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)numbers);
#elif defined(__AVX2__)
  const __m256 zero = _mm256_setzero_ps();  // the second one, which a NaN gives way to
  const __m256 eight = _mm256_max_ps(_mm256_max_ps(low_of(numbers), zero), _mm256_max_ps(high_of(numbers), zero));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float top = 0;
  for (int lane = 0; lane < kLanes; lane++) top = numbers[lane] > top ? numbers[lane] : top;
  return top;
#endif
}

inline bool any(Ints lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#else
  int32_t found = 0;
  for (int lane = 0; lane < kLanes; lane++) found |= lanes[lane];
  return found != 0;
#endif
}

// Heads that follow one another are one long head.
Tensor merged(Tensor t) {
  if (t.heads == 1 || t.head_stride == t.width * t.number_bytes()) t.width *= t.heads, t.heads = 1;
  return t;
}

int64_t widest_of(const Tensor* tensors, int64_t count) {
  int64_t widest = 0;
  for (int64_t at = 0; at < count; at++) {
    const int64_t channels = tensors[at].heads * tensors[at].width;
    widest = channels > widest ? channels : widest;
  }
  return widest + 2 * kLanes;
}

}  // namespace
