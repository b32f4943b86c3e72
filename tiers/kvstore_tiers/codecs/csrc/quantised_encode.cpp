// Encodes layers for quantised.py; `quantised.h` says how.
#include "quantised_avx2.h"

#include <cstdlib>
#include <type_traits>

namespace {

constexpr float kHuge = 1e18f, kTiny = 1e-15f, kNoScale = 1e-30f;

struct Layer {
  const uint8_t* numbers;   // of the tensor in the layer: rows of channels
  uint8_t* coded;           // of the tensor
  float *squares, *errors;  // sums, by channel
  float amplitude, worst;   // the largest number, the largest error
  bool is_sound;
  int64_t nbytes;
};

struct Room {  // of a group of tokens: for each scale, the range of its numbers, and what comes of it
  float *low, *high, *top, *scale, *inverse;
  uint8_t *small, *rows;  // numbers of 4 bits, a byte each; a tensor whose heads are apart
};

// The greatest magnitude, in integers: those of finite numbers are in their order, infinities and NaNs above.
template <int kType>
struct Top {
  using Lanes = typename std::conditional<kType == kF32, Words, Halves>::type;
  Lanes most = {0};
  inline void add(const uint8_t* from) {
    Lanes found;
    memcpy(&found, from, sizeof found);
    if constexpr (kType == kF32) {
      found &= 0x7fffffffu;
    } else {
      found &= (uint16_t)0x7fff;
    }
    most = greater(found, most);
  }
  inline Floats floats() const {
    uint8_t room[64] = {0};
    memcpy(room, &most, sizeof most);
    return Number<kType>::load(room);
  }
  inline float of_all() const {
    const uint32_t found = greatest(most);
    uint8_t room[64] = {0};
    memcpy(room, &found, Number<kType>::kBytes);
    return Number<kType>::load(room)[0];
  }
};

// Sixteen numbers, of which `count` are there; the first one in the place of the others.
template <int kType>
struct Some {
  uint8_t room[64];
  inline Some(const uint8_t* from, int count) {
    constexpr int kBytes = Number<kType>::kBytes;
    for (int lane = 0; lane < kLanes; lane++) memcpy(room + lane * kBytes, from + (lane < count ? lane : 0) * kBytes, kBytes);
  }
};

// The range of numbers. With 8 bits their sizes alone count.
template <int kType, int kBits>
struct Range {
  Top<kType> top;
  Floats low = splat(3e38f), high = splat(-3e38f);
  inline void add(const uint8_t* from) {
    top.add(from);
    if (kBits == 4) {
      const Floats x = Number<kType>::load(from);
      low = least(x, low), high = most(x, high);
    }
  }
};

// The ranges of a group of `tokens` tokens, from `from` on: of each channel, or of `size` numbers of a token.
template <int kType, int kBits>
void find_ranges(bool by_channel, int64_t tokens, int64_t channels, int64_t size, const uint8_t* from, const Room& room) {
  constexpr int kBytes = Number<kType>::kBytes;
  const int64_t row_bytes = channels * kBytes;
  for (int64_t first = 0; first < channels && by_channel; first += kLanes) {
    const int count = channels - first < kLanes ? (int)(channels - first) : kLanes;
    Range<kType, kBits> range;
    for (int64_t token = 0; token < tokens; token++) {
      const uint8_t* at = from + token * row_bytes + first * kBytes;
      count == kLanes ? range.add(at) : range.add(Some<kType>(at, count).room);
    }
    const Floats top = range.top.floats();
    memcpy(room.top + first, &top, 64), memcpy(room.low + first, &range.low, 64), memcpy(room.high + first, &range.high, 64);
  }
  int64_t place = 0;
  for (int64_t token = 0; token < tokens && !by_channel; token++) {
    for (int64_t first = 0; first < channels; first += size, place++) {
      const int64_t last = first + size < channels ? first + size : channels;
      Range<kType, kBits> range;
      for (int64_t channel = first; channel < last; channel += kLanes) {
        const uint8_t* at = from + token * row_bytes + channel * kBytes;
        last - channel >= kLanes ? range.add(at) : range.add(Some<kType>(at, (int)(last - channel)).room);
      }
      room.top[place] = range.top.of_all();
      float low = range.low[0], high = range.high[0];
      for (int lane = 1; lane < kLanes && kBits == 4; lane++) {
        low = range.low[lane] < low ? range.low[lane] : low, high = range.high[lane] > high ? range.high[lane] : high;
      }
      room.low[place] = low, room.high[place] = high;
    }
  }
  if (!by_channel) memset(room.top + place, 0, 64);
}

// The scales of `count` ranges, written to `scales` and, for 4 bits, `lows`. Returns the largest number.
template <int kType, int kBits>
float find_scales(int64_t count, const Room& room, uint8_t* scales, uint8_t* lows, bool& is_sound) {
  constexpr int kBytes = Number<kType>::kBytes;
  Floats largest = splat(0);
  for (int64_t at = 0; at < count; at += kLanes) {
    const int64_t used = count - at < kLanes ? count - at : kLanes;
    Floats low, high, top;
    memcpy(&low, room.low + at, 64), memcpy(&high, room.high + at, 64), memcpy(&top, room.top + at, 64);
    is_sound = is_sound && !any(~(top < kHuge));  // a NaN is below nothing
    largest = most(top, largest);
    uint8_t some[64];
    Floats step = kBits == 8 ? top / 127.0f : (high - low) / 15.0f;
    step = step < kNoScale ? splat(0) : step;
    const Floats scale = Number<kType>::not_below(step, some);
    const Floats inverse = scale > 0.0f ? 1.0f / scale : splat(0);
    memcpy(room.scale + at, &scale, 64), memcpy(room.inverse + at, &inverse, 64);
    memcpy(scales + at * kBytes, some, used * kBytes);
    if (kBits == 4) {
      low = Number<kType>::as_stored(low + 0.0f);  // no -0
      memcpy(room.low + at, &low, 64);
      Number<kType>::store(some, low);
      memcpy(lows + at * kBytes, some, used * kBytes);
    }
  }
  return top_of(largest);
}

struct Scale {
  Floats scale, inverse, low;
  inline Scale() {}
  inline Scale(const Room& room, int64_t at) {
    memcpy(&scale, room.scale + at, 64), memcpy(&inverse, room.inverse + at, 64), memcpy(&low, room.low + at, 64);
  }
  static inline Scale one(const Room& room, int64_t at) {
    Scale found;
    found.scale = splat(room.scale[at]), found.inverse = splat(room.inverse[at]), found.low = splat(room.low[at]);
    return found;
  }
};

// Quantise sixteen numbers, add what is lost to the sums.
template <int kType, int kBits, bool kNear>
inline Octets quantise(Floats x, const Scale& by, Floats& squares, Floats& errors, Floats& worst) {
  Floats shifted;
  if (kBits == 8) {
    // Scales are rounded up, so that a quotient is over 127 by its own rounding alone, which the sum removes.
    shifted = x * by.inverse + kWhole;
  } else {
    shifted = least(most((x - by.low) * by.inverse, splat(0)), splat(15)) + kWhole;
  }
  const Floats small = shifted - kWhole;
  const Floats back = kBits == 8 ? small * by.scale : small * by.scale + by.low;
  const Floats error = x - (kNear ? Number<kType>::rounded_to(back) : Number<kType>::as_stored(back));
  squares += x * x;
  errors += error * error;
  worst = most(worst, magnitude(error));
  return low_octets(shifted);
}

// Quantise kChunks times sixteen channels of a group of tokens, side by side, or the last ones, which are fewer.
template <int kType, int kBits, bool kByChannel, bool kNear, int kChunks>
void quantise_channels(int64_t tokens, int64_t channels, int64_t size, int64_t first, const uint8_t* from, const Room& room,
                       uint8_t* into, Layer& layer, Floats& worst) {
  constexpr int kBytes = Number<kType>::kBytes;
  const int count = channels - first < kLanes ? (int)(channels - first) : kLanes;
  Floats squares[kChunks], errors[kChunks];
  Scale by[kChunks];
  squares[0] = errors[0] = splat(0);
  for (int chunk = 0; chunk < kChunks; chunk++) {
    memcpy(&squares[chunk], layer.squares + first + chunk * kLanes, count * 4);
    memcpy(&errors[chunk], layer.errors + first + chunk * kLanes, count * 4);
    if (kByChannel) by[chunk] = Scale(room, first + chunk * kLanes);
  }
  const int64_t columns = (channels + size - 1) / size;
  Floats lost = worst;
  for (int64_t token = 0; token < tokens; token++, from += channels * kBytes, into += channels) {
    for (int chunk = 0; chunk < kChunks; chunk++) {
      const int64_t channel = first + chunk * kLanes;
      if (!kByChannel) by[chunk] = Scale::one(room, token * columns + (kBits == 8 ? 0 : channel / size));
      const uint8_t* at = from + channel * kBytes;
      const Floats x = kChunks > 1 ? Number<kType>::load(at) : Number<kType>::load(Some<kType>(at, count).room);
      const Octets octets = quantise<kType, kBits, kNear>(x, by[chunk], squares[chunk], errors[chunk], lost);
      if (kChunks > 1) {
        memcpy(into + channel, &octets, kLanes);
        if (chunk % 2 == 0) __builtin_prefetch(at + layer.nbytes);  // of the next layer: channels are read in strides
      } else {
        memcpy(into + channel, &octets, count);
      }
    }
  }
  worst = lost;
  for (int chunk = 0; chunk < kChunks; chunk++) {
    memcpy(layer.squares + first + chunk * kLanes, &squares[chunk], count * 4);
    memcpy(layer.errors + first + chunk * kLanes, &errors[chunk], count * 4);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kMany = 2;

// Quantise kChunks times sixteen channels of a group of tokens, as the function above.
template <int kType, int kBits, bool kByChannel, bool kNear, int kChunks>
void quantise_whole(int64_t tokens, int64_t channels, int64_t size, int64_t first, const uint8_t* from, const Room& room,
                    uint8_t* into, Layer& layer, Floats& worst) {
  constexpr int kBytes = Number<kType>::kBytes, kVectors = 2 * kChunks;
  Eight<kType> by[kVectors];
  for (int at = 0; at < kVectors; at++) {
    by[at].squares = _mm256_loadu_ps(layer.squares + first + 8 * at);
    by[at].errors = _mm256_loadu_ps(layer.errors + first + 8 * at);
    if (!kByChannel) continue;
    by[at].scale = _mm256_loadu_ps(room.scale + first + 8 * at);
    by[at].inverse = _mm256_loadu_ps(room.inverse + first + 8 * at);
    by[at].low = _mm256_loadu_ps(room.low + first + 8 * at);
  }
  const int64_t columns = (channels + size - 1) / size;
  __m256 lost = _mm256_setzero_ps();
  for (int64_t token = 0; token < tokens; token++, from += channels * kBytes, into += channels) {
    for (int at = 0; at < kVectors; at += 2) {
      const int64_t channel = first + 8 * at;
      if (!kByChannel) {
        const int64_t place = token * columns + (kBits == 8 ? 0 : channel / size);
        by[at].scale = by[at + 1].scale = _mm256_set1_ps(room.scale[place]);
        by[at].inverse = by[at + 1].inverse = _mm256_set1_ps(room.inverse[place]);
        by[at].low = by[at + 1].low = _mm256_set1_ps(room.low[place]);
      }
      const uint8_t* numbers = from + channel * kBytes;
      const __m256 low = by[at].template quantise<kBits, kNear>(Eight<kType>::load(numbers), lost);
      const __m256 high = by[at + 1].template quantise<kBits, kNear>(Eight<kType>::load(numbers + 8 * kBytes), lost);
      const Octets octets = low_octets(low, high);
      memcpy(into + channel, &octets, kLanes);
      if (at % 4 == 0) __builtin_prefetch(numbers + layer.nbytes);  // of the next layer: channels are read in strides
    }
  }
  worst = most(worst, joined(lost, lost));
  for (int at = 0; at < kVectors; at++) {
    _mm256_storeu_ps(layer.squares + first + 8 * at, by[at].squares);
    _mm256_storeu_ps(layer.errors + first + 8 * at, by[at].errors);
  }
}
#else
constexpr int kMany = 4;

template <int kType, int kBits, bool kByChannel, bool kNear, int kChunks>
void quantise_whole(int64_t tokens, int64_t channels, int64_t size, int64_t first, const uint8_t* from, const Room& room,
                    uint8_t* into, Layer& layer, Floats& worst) {
  quantise_channels<kType, kBits, kByChannel, kNear, kChunks>(tokens, channels, size, first, from, room, into, layer, worst);
}
#endif

template <int kType, int kBits, bool kByChannel, bool kNear>
void quantise_group(int64_t tokens, int64_t channels, int64_t size, const uint8_t* from, const Room& room, uint8_t* into,
                    Layer& layer, Floats& worst) {
  int64_t first = 0;
  for (; first + kMany * kLanes <= channels; first += kMany * kLanes) {
    quantise_whole<kType, kBits, kByChannel, kNear, kMany>(tokens, channels, size, first, from, room, into, layer, worst);
  }
  for (; first < channels; first += kLanes) {
    quantise_channels<kType, kBits, kByChannel, kNear, 1>(tokens, channels, size, first, from, room, into, layer, worst);
  }
}

void pack(const uint8_t* small, int64_t count, uint8_t* to) {
  for (int64_t at = 0; at < count / 2; at++) to[at] = (uint8_t)(small[2 * at] | small[2 * at + 1] << 4);
  if (count & 1) to[count / 2] = small[count - 1];
}

// Copy the tensor's numbers as rows of channels.
void copy_rows(const Tensor& t, const uint8_t* numbers, uint8_t* rows) {
  const int64_t head_bytes = t.width * t.number_bytes();
  for (int64_t token = 0; token < t.tokens; token++) {
    for (int64_t head = 0; head < t.heads; head++) {
      memcpy(rows + (token * t.heads + head) * head_bytes, numbers + token * t.token_stride + head * t.head_stride, head_bytes);
    }
  }
}

// Return the tensor's numbers as rows of channels, copied where heads are apart.
const uint8_t* rows_of(const Tensor& t, const uint8_t* numbers, uint8_t* rows) {
  if (t.heads == 1 && t.token_stride == t.width * t.number_bytes()) return numbers;
  copy_rows(t, numbers, rows);
  return rows;
}

template <int kType, int kBits>
void encode(const Tensor& t, Layer& layer, const Room& room) {
  constexpr int kBytes = Number<kType>::kBytes;
  const Places places(kBits, t, kBytes);
  const int64_t channels = t.heads * t.width, size = kBits == 8 ? channels : 32;
  const bool by_channel = t.kind == 1;
  const uint8_t* numbers = rows_of(t, layer.numbers, room.rows);
  uint8_t *scales = layer.coded, *lows = scales + places.scales_bytes, *coded = scales + places.numbers_at(kBits);
  Floats worst = splat(0);
  for (int64_t token = 0; token < t.tokens; token += kGroup<kBits>) {
    const int64_t tokens = t.tokens - token < kGroup<kBits> ? t.tokens - token : kGroup<kBits>;
    const int64_t count = by_channel ? channels : tokens * places.columns;
    const uint8_t* from = numbers + token * channels * kBytes;
    uint8_t* into = kBits == 8 ? coded : room.small;
    find_ranges<kType, kBits>(by_channel, tokens, channels, size, from, room);
    const float top = find_scales<kType, kBits>(count, room, scales, lows, layer.is_sound);
    layer.amplitude = top > layer.amplitude ? top : layer.amplitude;
    if (top < kFar * Number<kType>::kMost) {
      by_channel ? quantise_group<kType, kBits, true, true>(tokens, channels, size, from, room, into, layer, worst)
                 : quantise_group<kType, kBits, false, true>(tokens, channels, size, from, room, into, layer, worst);
    } else {
      by_channel ? quantise_group<kType, kBits, true, false>(tokens, channels, size, from, room, into, layer, worst)
                 : quantise_group<kType, kBits, false, false>(tokens, channels, size, from, room, into, layer, worst);
    }
    for (int64_t row = 0; row < tokens && kBits == 4; row++) pack(room.small + row * channels, channels, coded + row * places.row_bytes);
    scales += count * kBytes, lows += count * kBytes, coded += tokens * places.row_bytes;
  }
  const float most_lost = top_of(worst);
  layer.worst = most_lost > layer.worst ? most_lost : layer.worst;
}

template <int kBits>
void encode_any(const Tensor& t, Layer& layer, const Room& room) {
  if (t.type == kF16) {
    encode<kF16, kBits>(t, layer, room);
  } else if (t.type == kBF16) {
    encode<kBF16, kBits>(t, layer, room);
  } else {
    encode<kF32, kBits>(t, layer, room);
  }
}

// The sum of numbers by channel: of sixteen lanes first, in order.
double sum_of(const float* numbers, int64_t count) {
  Floats lanes = splat(0);
  for (int64_t at = 0; at < count; at += kLanes) {
    lanes += load_some<kF32>((const uint8_t*)(numbers + at), count - at < kLanes ? (int)(count - at) : kLanes);
  }
  double sum = 0;
  for (int lane = 0; lane < kLanes; lane++) sum += lanes[lane];
  return sum;
}

}  // namespace

// Encode `layers` layers to `out`, which has `room_bytes` bytes. A layer takes `coded_bytes` bytes, or is copied as it is
// where numbers are not finite, huge, or all tiny, or lose a larger part of their RMS than `most_lost`. `sums` are of the squares, of those of the errors, and the largest
// error. Returns how many layers are copied, or -1 when they do not fit or there is no memory.
extern "C" int64_t kv_quantise(const Tensor* tensors, int64_t count, const uint8_t* payload, int64_t layers,
                               int64_t layer_bytes, int64_t coded_bytes, uint8_t* out, int64_t room_bytes, double most_lost,
                               uint8_t* as_it_is, double* sums) {
  int64_t written = 0, copied = 0, channels = 0;
  const int64_t widest = widest_of(tensors, count), scales = widest + 96;  // of a group
  for (int64_t at = 0; at < count; at++) channels += tensors[at].heads * tensors[at].width;
  uint8_t* memory = (uint8_t*)malloc(scales * 20 + widest * 32 + layer_bytes + channels * 8 + 64);
  if (!memory) return -1;
  Room room = {(float*)memory, (float*)memory + scales, (float*)memory + 2 * scales, (float*)memory + 3 * scales,
               (float*)memory + 4 * scales, memory + 20 * scales, memory + 20 * scales + widest * 32};
  float* squares = (float*)(memory + (20 * scales + widest * 32 + layer_bytes + 63) / 64 * 64);
  for (int64_t number = 0; number < layers && copied >= 0; number++) {
    const uint8_t* whole = payload + number * layer_bytes;
    memset(squares, 0, channels * 8);
    Layer layer = {whole, out + written, squares, squares + channels, 0, 0, true, layer_bytes};
    if (room_bytes - written < coded_bytes) {
      copied = -1;
      break;
    }
    for (int64_t at = 0; at < count; at++) {
      const Tensor t = merged(tensors[at]);
      layer.numbers = whole + t.offset;
      if (t.bits == 0) {
        copy_rows(t, layer.numbers, layer.coded);
      } else {
        t.bits == 8 ? encode_any<8>(t, layer, room) : encode_any<4>(t, layer, room);
      }
      layer.coded += coded_bytes_of(t);
      layer.squares += t.heads * t.width, layer.errors += t.heads * t.width;
    }
    const double whole_sum = sum_of(squares, channels), lost_sum = sum_of(squares + channels, channels);
    const bool is_bad = lost_sum > most_lost * most_lost * whole_sum;
    as_it_is[number] = !layer.is_sound || is_bad || (layer.amplitude > 0 && layer.amplitude < kTiny);
    if (!as_it_is[number]) {
      sums[0] += whole_sum, sums[1] += lost_sum;
      sums[2] = layer.worst > sums[2] ? layer.worst : sums[2];
      written += coded_bytes;
    } else if (room_bytes - written < layer_bytes) {
      copied = -1;
    } else {
      memcpy(out + written, whole, layer_bytes);
      written += layer_bytes, copied++;
    }
  }
  free(memory);
  return copied;
}
