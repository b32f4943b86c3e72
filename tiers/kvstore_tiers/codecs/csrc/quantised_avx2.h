// Eight numbers of a tensor at a time, for processors with AVX2 alone, where vectors of sixteen are kept in memory.
#pragma once
#include "quantised.h"

namespace {

constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to a whole number, in its lowest bits

#if defined(__AVX2__) && !defined(__AVX512F__)
// Eight channels: their scales, and the sums over tokens. `quantise` does what the function of this name does.
template <int kType>
struct Eight {
  __m256 scale, inverse, low, squares, errors;

  static inline __m256 load(const uint8_t* from) {
    if constexpr (kType == kF32) return _mm256_loadu_ps((const float*)from);
    const __m128i halves = _mm_loadu_si128((const __m128i*)from);
    if constexpr (kType == kBF16) return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
    return _mm256_cvtph_ps(halves);
  }
  static inline __m256 rounded_to(__m256 numbers) {
    if constexpr (kType == kF32) return numbers;
    if constexpr (kType == kF16) return _mm256_cvtph_ps(_mm256_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT));
    const __m256i bits = (__m256i)numbers, odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    return (__m256)_mm256_and_si256(sum, _mm256_set1_epi32((int)0xffff0000u));
  }
  template <int kBits, bool kNear>
  inline __m256 quantise(__m256 x, __m256& worst) {
    const __m256 whole = _mm256_set1_ps(kWhole), most = _mm256_set1_ps(Number<kType>::kMost);
    __m256 shifted = (kBits == 8 ? x : x - low) * inverse;
    if (kBits == 4) shifted = _mm256_min_ps(_mm256_max_ps(shifted, _mm256_setzero_ps()), _mm256_set1_ps(15));
    shifted += whole;
    __m256 back = (shifted - whole) * scale;
    if (kBits == 4) back += low;
    if (!kNear) back = _mm256_min_ps(_mm256_max_ps(back, -most), most);
    const __m256 error = x - rounded_to(back);
    squares += x * x;
    errors += error * error;
    worst = _mm256_max_ps(worst, _mm256_and_ps(error, (__m256)_mm256_set1_epi32(0x7fffffff)));
    return shifted;
  }

  static inline __m256 floats_of(__m128i octets) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(octets)); }

  // Store sixteen numbers, past the caches where that is wanted: `to` is then a multiple of kPast.
  template <bool kIsPast>
  static inline void put(uint8_t* to, __m256 low, __m256 high) {
    if constexpr (kType == kF32) {
      put<kIsPast>(to, (__m256i)low), put<kIsPast>(to + 32, (__m256i)high);
    } else {
      put<kIsPast>(to, Number<kType>::halves(low, high));
    }
  }
  template <bool kIsPast>
  static inline void put(uint8_t* to, __m256i octets) {
    kIsPast ? _mm256_stream_si256((__m256i*)to, octets) : _mm256_storeu_si256((__m256i*)to, octets);
  }
};
#endif

}  // namespace
