// Decodes layers for quantised.py; `quantised.h` says how.
#include "quantised_avx2.h"

#include <cstdlib>

namespace {

constexpr int64_t kLarge = 1 << 20;  // what a cache next to a core would not hold

void unpack(const uint8_t* __restrict from, int64_t count, uint8_t* __restrict small) {
  for (int64_t at = 0; at < count / 2; at++) {
    small[2 * at] = from[at] & 15;
    small[2 * at + 1] = from[at] >> 4;
  }
  if (count & 1) small[count - 1] = from[count / 2] & 15;
}

template <int kBits>
inline Floats number_of(const uint8_t* octets, const float* scale, const float* low) {
  Chars chars;
  Floats by, plus;
  memcpy(&chars, octets, kLanes);
  memcpy(&by, scale, 64);
  if (kBits == 8) return floats_of_chars(chars) * by;
  memcpy(&plus, low, 64);
  return floats_of_chars(chars) * by + plus;
}

template <int kType, bool kIsPast>
inline void put(uint8_t* to, Floats numbers) {
  kIsPast ? Number<kType>::store_past(to, numbers) : Number<kType>::store(to, numbers);
}

// Decode `count` numbers of a row, sixteen at a time, none of which may be too large. Either each has its scale, or
// `one` is for all.
template <int kType, int kBits, bool kIsPast>
inline void decode_row(int64_t count, const uint8_t* octets, const float* scale, const float* low, const float* one, uint8_t* to) {
#pragma GCC unroll 4
  for (int64_t at = 0; at < count; at += kLanes) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i chars = _mm_loadu_si128((const __m128i*)(octets + at));
    __m256 first = Eight<kType>::floats_of(chars), second = Eight<kType>::floats_of(_mm_srli_si128(chars, 8));
    first *= one ? _mm256_set1_ps(*one) : _mm256_loadu_ps(scale + at);
    second *= one ? _mm256_set1_ps(*one) : _mm256_loadu_ps(scale + at + 8);
    if (kBits == 4) first += _mm256_loadu_ps(low + at), second += _mm256_loadu_ps(low + at + 8);
    Eight<kType>::template put<kIsPast>(to + at * Number<kType>::kBytes, first, second);
#else
    if (one) {
      Chars chars;
      memcpy(&chars, octets + at, kLanes);
      put<kType, kIsPast>(to + at * Number<kType>::kBytes, floats_of_chars(chars) * splat(*one));
    } else {
      put<kType, kIsPast>(to + at * Number<kType>::kBytes, number_of<kBits>(octets + at, scale + at, low + at));
    }
#endif
  }
}

template <int kType, int kBits, bool kIsPast>
void decode(const Tensor& t, const uint8_t* coded, uint8_t* numbers, uint8_t* small, float* rows) {
  constexpr int kBytes = Number<kType>::kBytes;
  const Places places(kBits, t, kBytes);
  const int64_t channels = t.heads * t.width, group = kBits == 8 ? 64 : 32;
  const uint8_t* from = coded + places.numbers_at(kBits);
  float *scale = rows, *low = rows + channels + kLanes;
  float one_scale = 0;  // of all numbers of a token
  const bool has_one = kBits == 8 && t.kind != 1;
  bool is_far = false;  // whether a number may be too large for its type
  for (int64_t token = 0; token < t.tokens; token++, from += places.row_bytes) {
    if (t.kind == 1 && token % group == 0) {
      const uint8_t* at = coded + token / group * channels * kBytes;
      for (int64_t channel = 0; channel < channels; channel += kLanes) {
        const int count = channels - channel < kLanes ? (int)(channels - channel) : kLanes;
        const Floats scales = load_some<kType>(at + channel * kBytes, count);
        is_far = (is_far && channel) || !(top_of(magnitude(scales)) * 256 < kFar * Number<kType>::kMost);
        memcpy(scale + channel, &scales, 64);
        const Floats lows = kBits == 8 ? splat(0) : load_some<kType>(at + places.scales_bytes + channel * kBytes, count);
        memcpy(low + channel, &lows, 64);
        is_far = is_far || !(top_of(magnitude(lows)) < kFar * Number<kType>::kMost);
      }
    } else if (t.kind != 1) {
      const uint8_t* at = coded + token * places.columns * kBytes;
      const int64_t size = kBits == 8 ? channels : 32;
      for (int64_t column = 0; column < places.columns; column++) {
        const float one = load_one<kType>(at + column * kBytes);
        const float lowest = kBits == 8 ? 0 : load_one<kType>(at + places.scales_bytes + column * kBytes);
        is_far = (is_far && column) || !(one * 256 < kFar * Number<kType>::kMost && lowest < kFar * Number<kType>::kMost &&
                                         lowest > -kFar * Number<kType>::kMost && one >= 0);
        const int64_t last = (column + 1) * size < channels ? (column + 1) * size : channels;
        if (kBits == 8 && column == 0) one_scale = one;
        for (int64_t channel = column * size; channel < last && kBits == 4; channel++) scale[channel] = one;
        for (int64_t channel = column * size; channel < last && kBits == 4; channel++) low[channel] = lowest;
      }
    }
    const uint8_t* row = from;
    if (kBits == 4) unpack(from, channels, small), row = small;
    for (int64_t head = 0; head < t.heads; head++) {
      uint8_t* to = numbers + token * t.token_stride + head * t.head_stride;
      const float* by = scale + head * t.width;
      const float* plus = low + head * t.width;
      const uint8_t* octets = row + head * t.width;
      const int64_t whole = t.width / kLanes * kLanes;
      if (has_one && (is_far || whole < t.width)) {
        for (int64_t channel = 0; channel < t.width; channel++) scale[head * t.width + channel] = one_scale;
      }
      if (!is_far) {
        has_one ? decode_row<kType, kBits, kIsPast>(whole, octets, by, plus, &one_scale, to)
                : decode_row<kType, kBits, kIsPast>(whole, octets, by, plus, nullptr, to);
      } else {
        for (int64_t at = 0; at < whole; at += kLanes) {
          const Floats x = number_of<kBits>(octets + at, by + at, plus + at);
          Number<kType>::store(to + at * kBytes, Number<kType>::clamped(x));
        }
      }
      if (whole < t.width) {
        uint8_t some[kLanes] = {0}, room[64];
        memcpy(some, octets + whole, t.width - whole);
        Number<kType>::store(room, Number<kType>::clamped(number_of<kBits>(some, by + whole, plus + whole)));
        memcpy(to + whole * kBytes, room, (t.width - whole) * kBytes);
      }
    }
  }
}

void copy_back(const Tensor& t, const uint8_t* rows, uint8_t* numbers) {
  const int64_t head_bytes = t.width * t.number_bytes();
  for (int64_t token = 0; token < t.tokens; token++) {
    for (int64_t head = 0; head < t.heads; head++, rows += head_bytes) {
      memcpy(numbers + token * t.token_stride + head * t.head_stride, rows, head_bytes);
    }
  }
}

template <int kBits, bool kIsPast>
void decode_any(const Tensor& t, const uint8_t* coded, uint8_t* numbers, uint8_t* small, float* rows) {
  if (t.type == kF16) {
    decode<kF16, kBits, kIsPast>(t, coded, numbers, small, rows);
  } else if (t.type == kBF16) {
    decode<kBF16, kBits, kIsPast>(t, coded, numbers, small, rows);
  } else {
    decode<kF32, kBits, kIsPast>(t, coded, numbers, small, rows);
  }
}

template <int kBits>
void decode_any(const Tensor& t, const uint8_t* coded, uint8_t* numbers, uint8_t* small, float* rows, bool is_large) {
  if (is_large && ((uintptr_t)numbers | t.token_stride | t.head_stride) % kPast == 0) {
    decode_any<kBits, true>(t, coded, numbers, small, rows);
  } else {
    decode_any<kBits, false>(t, coded, numbers, small, rows);
  }
}

}  // namespace

// Copies the next piece of a payload and hashes it; returns the hash of all at the last one (host_copies.cpp).
typedef uint64_t (*More)(uint64_t* hash, uint8_t* target, const uint8_t* source, uint64_t nbytes, uint64_t is_last);

// Decode layers of the right length. With `more`, each layer is decoded in a cache, copied from there and hashed into
// `hash`, whose first word gets the hash of the payload. Returns -1 when there is no memory.
extern "C" int64_t kv_dequantise(const Tensor* tensors, int64_t count, const uint8_t* coded, int64_t layers,
                                 int64_t coded_bytes, uint8_t* payload, int64_t layer_bytes, More more, uint64_t* hash) {
  const int64_t widest = widest_of(tensors, count), small_bytes = (widest + 63) / 64 * 64;
  const int64_t rows_bytes = (2 * widest * 4 + 191) / 64 * 64;
  uint8_t* small = (uint8_t*)aligned_alloc(64, small_bytes + rows_bytes + (more ? (layer_bytes + 63) / 64 * 64 : 0));
  if (!small) return -1;
  const bool is_large = !more && layers * layer_bytes >= kLarge;
  float* rows = (float*)(small + small_bytes);
  uint8_t* room = small + small_bytes + rows_bytes;
  for (int64_t number = 0; number < layers; number++, payload += layer_bytes, coded += coded_bytes) {
    const uint8_t* from = coded;
    uint8_t* layer = more ? room : payload;
    for (int64_t at = 0; at < count; at++) {
      const Tensor t = merged(tensors[at]);
      uint8_t* to = layer + t.offset;
      if (t.bits == 0) {
        copy_back(t, from, to);
      } else if (t.bits == 8) {
        decode_any<8>(t, from, to, small, rows, is_large);
      } else {
        decode_any<4>(t, from, to, small, rows, is_large);
      }
      from += coded_bytes_of(t);
    }
    if (more) {
      const uint64_t hashed = more(hash, payload, room, layer_bytes, number == layers - 1);
      if (number == layers - 1) hash[0] = hashed;
    }
  }
  fence();
  free(small);
  return 0;
}
