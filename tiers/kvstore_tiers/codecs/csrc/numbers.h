// Sixteen numbers of a tensor at a time, of float16, bfloat16 or float32, as floats and back. NumPy gives the same bits.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Octets __attribute__((vector_size(16)));
typedef int8_t Chars __attribute__((vector_size(16)));
constexpr int kLanes = 16;
enum Type { kF16 = 1, kBF16 = 2, kF32 = 3 };  // as in shapes.py

#if defined(__AVX2__)  // by shuffles: a copy through memory would wait for its own stores
typedef float HalfFloats __attribute__((vector_size(32)));
static inline __m256 low_of(Floats a) { return (__m256)__builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7); }
static inline __m256 high_of(Floats a) { return (__m256)__builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15); }
static inline Floats joined(__m256 low, __m256 high) {
  return __builtin_shufflevector((HalfFloats)low, (HalfFloats)high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
#endif

static inline Floats splat(float value) { return Floats{} + value; }
#if defined(__AVX512F__)  // as the lines below, a NaN in `a` too
static inline Floats least(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
static inline Floats most(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
#else
static inline Floats least(Floats a, Floats b) { return a < b ? a : b; }
static inline Floats most(Floats a, Floats b) { return a > b ? a : b; }
#endif
static inline Words greater(Words a, Words b) { return a > b ? a : b; }
static inline Halves greater(Halves a, Halves b) {
#if defined(__AVX2__)
  return (Halves)_mm256_max_epu16((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}
static inline uint32_t greatest(Words a) {
  uint32_t found = 0;
  for (int lane = 0; lane < kLanes; lane++) found = a[lane] > found ? a[lane] : found;
  return found;
}
static inline uint32_t greatest(Halves a) {
#if defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)a), high = _mm256_extracti128_si256((__m256i)a, 1);
  const __m128i least_of = _mm_xor_si128(_mm_max_epu16(low, high), _mm_set1_epi16(-1));
  return 0xffff & ~(uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(least_of));
#else
  uint32_t found = 0;
  for (int lane = 0; lane < kLanes; lane++) found = a[lane] > found ? a[lane] : found;
  return found;
#endif
}
static inline Floats magnitude(Floats a) {
  Words bits;
  memcpy(&bits, &a, sizeof bits);
  bits &= 0x7fffffffu;
  memcpy(&a, &bits, sizeof bits);
  return a;
}
// Conversions between widths, which compilers do number by number unless they are told.
static inline Words words_of(const uint8_t* from) {  // 16 unsigned numbers of 16 bits
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#else
  Halves halves;
  memcpy(&halves, from, 32);
  return __builtin_convertvector(halves, Words);
#endif
}

#if defined(__AVX512F__)
static inline __m256i halves_of(Words words) { return _mm512_cvtepi32_epi16((__m512i)words); }
#elif defined(__AVX2__)
static inline __m256i halves_of(Words words) {  // of words below 65,536
  Floats bits;
  memcpy(&bits, &words, 64);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)low_of(bits), (__m256i)high_of(bits)), 0xd8);
}
#endif

static inline void put_halves(uint8_t* to, Words words) {
#if defined(__AVX2__)
  _mm256_storeu_si256((__m256i*)to, halves_of(words));
#else
  Halves halves = __builtin_convertvector(words, Halves);
  memcpy(to, &halves, 32);
#endif
}

static inline Floats floats_of_chars(Chars chars) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)chars));
#elif defined(__AVX2__)
  __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)chars));
  __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)chars, 8)));
  return joined(low, high);
#else
  Floats found;
  for (int lane = 0; lane < kLanes; lane++) found[lane] = (float)chars[lane];
  return found;
#endif
}

// The lowest bytes of sixteen words.
#if defined(__AVX2__)
static inline Octets low_octets(__m256 low, __m256 high) {
  const __m256i lowest = _mm256_set1_epi32(255);
  __m256i halves = _mm256_packus_epi32(_mm256_and_si256((__m256i)low, lowest), _mm256_and_si256((__m256i)high, lowest));
  halves = _mm256_permute4x64_epi64(halves, 0xd8);
  return (Octets)_mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
#endif
static inline Octets low_octets(Floats numbers) {
#if defined(__AVX512F__)
  return (Octets)_mm512_cvtepi32_epi8((__m512i)numbers);
#elif defined(__AVX2__)
  return low_octets(low_of(numbers), high_of(numbers));
#else
  Words words;
  memcpy(&words, &numbers, 64);
  return __builtin_convertvector(words, Octets);
#endif
}

static inline float float_of_half(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | fraction << 13;
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {  // a denormal: fraction * 2^-24
    float value = (float)fraction * 5.9604644775390625e-8f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t half_of_float(float value) {  // a finite one
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) return sign | 0x7c00;
  if (bits < 0x38800000u) {  // a denormal: the sum has its bits at the lower end, rounded to even
    float sum;
    memcpy(&sum, &bits, 4);
    sum += 0.5f;
    memcpy(&bits, &sum, 4);
    return sign | (uint16_t)(bits - 0x3f000000u);
  }
  return sign | (uint16_t)((bits + 0xc8000fffu + (bits >> 13 & 1)) >> 13);
}

constexpr int kPast = 32;
static inline void fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

template <int kType>
struct Number {
  static constexpr int kBytes = kType == kF32 ? 4 : 2;
  static constexpr float kMost = kType == kF16 ? 65504.0f : kType == kBF16 ? 3.3895313892515355e38f : 3.4028234663852886e38f;

  static inline Floats load(const uint8_t* from) {
    Floats found;
    if constexpr (kType == kF32) {
      memcpy(&found, from, 64);
    } else if constexpr (kType == kBF16) {
      Words words = words_of(from) << 16;
      memcpy(&found, &words, 64);
    } else {
#if defined(__AVX512F__)
      found = (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
      __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
      __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + 1));
      found = joined(low, high);
#else
      uint16_t halves[kLanes];
      memcpy(halves, from, 32);
      for (int lane = 0; lane < kLanes; lane++) found[lane] = float_of_half(halves[lane]);
#endif
    }
    return found;
  }

  static inline Words words_of_bfloats(Floats numbers) {
    Words words;
    memcpy(&words, &numbers, 64);
    return (words + 0x7fffu + (words >> 16 & 1u)) >> 16;
  }

#if defined(__AVX512F__)
  // Numbers of 16 bits as `store` leaves them, made in registers: a load of two stores would wait for both.
  static inline __m256i halves(Floats numbers) {
    if constexpr (kType == kBF16) return halves_of(words_of_bfloats(numbers));
    return _mm512_cvtps_ph((__m512)numbers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#elif defined(__AVX2__)
  static inline __m256i halves(__m256 low, __m256 high) {
    if constexpr (kType == kBF16) return halves_of(words_of_bfloats(joined(low, high)));
    return _mm256_set_m128i(_mm256_cvtps_ph(high, 0), _mm256_cvtps_ph(low, 0));
  }
  static inline __m256i halves(Floats numbers) { return halves(low_of(numbers), high_of(numbers)); }
#endif

  // Finite numbers that are not above kMost.
  static inline void store(uint8_t* to, Floats numbers) {
    if constexpr (kType == kF32) {
      memcpy(to, &numbers, 64);
    } else if constexpr (kType == kBF16) {
      put_halves(to, words_of_bfloats(numbers));
    } else {
#if defined(__AVX2__)
      _mm256_storeu_si256((__m256i*)to, halves(numbers));
#else
      uint16_t each[kLanes];
      for (int lane = 0; lane < kLanes; lane++) each[lane] = half_of_float(numbers[lane]);
      memcpy(to, each, 32);
#endif
    }
  }

  // Store past the caches, so that the memory is not read first; `fence` follows. `to` is a multiple of kPast.
  static inline void store_past(uint8_t* to, Floats numbers) {
#if defined(__AVX2__)
    if constexpr (kType == kF32) {
      _mm256_stream_si256((__m256i*)to, (__m256i)low_of(numbers));
      _mm256_stream_si256((__m256i*)(to + kPast), (__m256i)high_of(numbers));
    } else {
      _mm256_stream_si256((__m256i*)to, halves(numbers));
    }
#else
    store(to, numbers);
#endif
  }

  // What `store` and `load` would leave of numbers that are not above kMost: rounded to the type.
  static inline Floats rounded_to(Floats numbers) {
    if constexpr (kType == kF32) return numbers;
    if constexpr (kType == kBF16) {
      Words words;
      memcpy(&words, &numbers, 64);
      words = (words + 0x7fffu + (words >> 16 & 1u)) & 0xffff0000u;
      memcpy(&numbers, &words, 64);
      return numbers;
    }
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)numbers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    uint8_t room[64];
    store(room, numbers);
    return load(room);
#endif
  }
  static inline Floats clamped(Floats numbers) { return least(most(numbers, splat(-kMost)), splat(kMost)); }
  static inline Floats as_stored(Floats numbers) { return rounded_to(clamped(numbers)); }

  // The smallest number of the type that is not below `numbers`, which are not negative.
  static inline Floats not_below(Floats numbers, uint8_t* to) {
    Floats found = as_stored(numbers);
    store(to, found);
    if constexpr (kType == kF32) return found;
    Ints is_below = found < numbers;  // -1 where it is
    put_halves(to, words_of(to) - (Words)is_below);
    return load(to);
  }
};

template <int kType>
static inline float load_one(const uint8_t* from) {
  float found;
  uint16_t half;
  memcpy(&found, from, kType == kF32 ? 4 : 0);
  memcpy(&half, from, 2);
  if constexpr (kType == kF32) return found;
  if constexpr (kType == kBF16) {
    const uint32_t bits = (uint32_t)half << 16;
    memcpy(&found, &bits, 4);
    return found;
  }
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  return float_of_half(half);
#endif
}

// Load `count` numbers, the rest zeros.
template <int kType>
static inline Floats load_some(const uint8_t* from, int count) {
  if (count == kLanes) return Number<kType>::load(from);
  uint8_t room[64] = {0};
  memcpy(room, from, count * Number<kType>::kBytes);
  return Number<kType>::load(room);
}
