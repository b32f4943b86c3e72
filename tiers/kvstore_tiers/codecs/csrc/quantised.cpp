// Layers of K and V as numbers of 8 or 4 bits and back, for quantised.py, which describes the form. NumPy does the same
// in quantised_arrays.py, to the bit: operations are never fused, and sums go over tokens in order, each channel alone.
#include "numbers.h"

#include <cstdlib>

namespace {

struct Tensor {  // as shapes.py has it
  int64_t kind, type, offset, tokens, heads, width, token_stride, head_stride;
};

constexpr float kFar = 0.4f;  // of the largest number: what is below needs no clamp
constexpr float kHuge = 1e18f, kTiny = 1e-15f, kNoScale = 1e-30f;

struct Layer {
  const uint8_t* numbers;   // of the tensor in the layer
  uint8_t* coded;           // of the tensor
  float *squares, *errors;  // sums, by channel
  float amplitude, worst;   // the largest number, the largest error
  bool is_sound;
};

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

struct Scale {
  Floats scale, inverse, low;
};

// The scale of numbers between `low` and `high`, of which the greatest magnitude is `top`; written to `scales` and, for
// 4 bits, to `lows`.
template <int kType, int kBits>
inline Scale scale_of(Floats low, Floats high, Floats top, uint8_t* scales, uint8_t* lows) {
  Scale found;
  Floats step = kBits == 8 ? top / 127.0f : (high - low) / 15.0f;
  step = step < kNoScale ? splat(0) : step;
  found.scale = Number<kType>::not_below(step, scales);
  found.inverse = found.scale > 0.0f ? 1.0f / found.scale : splat(0);
  found.low = splat(0);
  if (kBits == 4) {
    found.low = Number<kType>::as_stored(low + 0.0f);  // no -0
    Number<kType>::store(lows, found.low);
  }
  return found;
}

// Quantise sixteen numbers, add what is lost to the sums.
template <int kType, int kBits, bool kNear>
__attribute__((always_inline)) inline Octets quantise(Floats x, const Scale& by, Floats& squares, Floats& errors, Floats& worst) {
  Floats small;
  if (kBits == 8) {
    // Scales are rounded up, so that a quotient is over 127 by its own rounding alone, which `rounded` removes.
    small = rounded(x * by.inverse);
  } else {
    small = rounded(least(most((x - by.low) * by.inverse, splat(0)), splat(15)));
  }
  Floats back = kBits == 8 ? small * by.scale : small * by.scale + by.low;
  Floats error = x - (kNear ? Number<kType>::rounded_to(back) : Number<kType>::as_stored(back));
  squares += x * x;
  errors += error * error;
  worst = most(worst, magnitude(error));
  Chars chars = chars_of_floats(small);
  Octets octets;
  memcpy(&octets, &chars, 16);
  return octets;
}

inline float top_of(Floats numbers) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)numbers);
#else
  float top = 0;
  for (int lane = 0; lane < kLanes; lane++) top = numbers[lane] > top ? numbers[lane] : top;
  return top;
#endif
}

void pack(const uint8_t* small, int64_t count, uint8_t* to) {
  for (int64_t at = 0; at < count / 2; at++) to[at] = (uint8_t)(small[2 * at] | small[2 * at + 1] << 4);
  if (count & 1) to[count / 2] = small[count - 1];
}

void unpack(const uint8_t* from, int64_t count, uint8_t* small) {
  for (int64_t at = 0; at < count / 2; at++) {
    small[2 * at] = from[at] & 15;
    small[2 * at + 1] = from[at] >> 4;
  }
  if (count & 1) small[count - 1] = from[count / 2] & 15;
}

template <int kBits>
struct Range {
  Floats low = splat(3e38f), high = splat(-3e38f), top = splat(0);
  Ints is_wrong = {0};
  inline void add(Floats x) {
    Floats size = magnitude(x);
    is_wrong |= ~(size < kHuge);  // a NaN is below nothing
    top = most(size, top);
    if (kBits == 4) low = least(x, low), high = most(x, high);
  }
};

inline bool any(Ints lanes) {
  int32_t found = 0;
  for (int lane = 0; lane < kLanes; lane++) found |= lanes[lane];
  return found != 0;
}

// A tensor with a scale for each channel of a group of tokens. `small` has room for the numbers of a group.
template <int kType, int kBits>
void encode_by_channel(const Tensor& t, Layer& layer, uint8_t* small) {
  constexpr int kBytes = Number<kType>::kBytes;
  const Places places(kBits, t, kBytes);
  const int64_t channels = t.heads * t.width, group = kBits == 8 ? 64 : 32;
  uint8_t* coded = layer.coded + places.numbers_at(kBits);
  Ints is_wrong = {0};
  for (int64_t row = 0; row < places.rows; row++) {
    const int64_t first = row * group, last = first + group < t.tokens ? first + group : t.tokens;
    uint8_t* into = kBits == 8 ? coded + first * channels : small;
    for (int64_t head = 0; head < t.heads; head++) {
      for (int64_t at = 0; at < t.width; at += kLanes) {
        const int count = t.width - at < kLanes ? (int)(t.width - at) : kLanes;
        const int64_t channel = head * t.width + at;
        const uint8_t* from = layer.numbers + head * t.head_stride + at * kBytes;
        Range<kBits> range;
        if (count == kLanes) {
          for (int64_t token = first; token < last; token++) range.add(Number<kType>::load(from + token * t.token_stride));
        } else {
          for (int64_t token = first; token < last; token++) range.add(load_some<kType>(from + token * t.token_stride, count));
        }
        const float top = top_of(range.top);
        layer.amplitude = top > layer.amplitude ? top : layer.amplitude;
        is_wrong |= range.is_wrong;
        uint8_t scales[64], lows[64];
        const Scale by = scale_of<kType, kBits>(range.low, range.high, range.top, scales, lows);
        memcpy(layer.coded + (row * channels + channel) * kBytes, scales, count * kBytes);
        if (kBits == 4) {
          memcpy(layer.coded + places.scales_bytes + (row * channels + channel) * kBytes, lows, count * kBytes);
        }
        Floats sums[2], squares, errors, worst = splat(0);
        sums[0] = sums[1] = splat(0);
        memcpy(&sums[0], layer.squares + channel, count * 4);
        memcpy(&sums[1], layer.errors + channel, count * 4);
        squares = sums[0], errors = sums[1];
        if (count == kLanes && top < kFar * Number<kType>::kMost) {
          for (int64_t token = first; token < last; token++) {
            const Floats x = Number<kType>::load(from + token * t.token_stride);
            const Octets octets = quantise<kType, kBits, true>(x, by, squares, errors, worst);
            memcpy(into + (token - first) * channels + channel, &octets, kLanes);
          }
        } else {
          for (int64_t token = first; token < last; token++) {
            const Floats x = load_some<kType>(from + token * t.token_stride, count);
            const Octets octets = quantise<kType, kBits, false>(x, by, squares, errors, worst);
            uint8_t some[kLanes];
            memcpy(some, &octets, kLanes);
            memcpy(into + (token - first) * channels + channel, some, count);
          }
        }
        sums[0] = squares, sums[1] = errors;
        memcpy(layer.squares + channel, &sums[0], count * 4);
        memcpy(layer.errors + channel, &sums[1], count * 4);
        const float most_lost = top_of(worst);
        layer.worst = most_lost > layer.worst ? most_lost : layer.worst;
      }
    }
    if (kBits == 4) {
      for (int64_t token = first; token < last; token++) {
        pack(small + (token - first) * channels, channels, coded + token * places.row_bytes);
      }
    }
  }
  layer.is_sound = layer.is_sound && !any(is_wrong);
}

// A tensor with a scale for each token, or for each 32 numbers of a token. `small` has room for the numbers of a token,
// `row` for them as floats.
template <int kType, int kBits>
void encode_by_token(const Tensor& t, Layer& layer, uint8_t* small, float* row) {
  constexpr int kBytes = Number<kType>::kBytes;
  const Places places(kBits, t, kBytes);
  const int64_t channels = t.heads * t.width, size = kBits == 8 ? channels : 32;
  uint8_t* coded = layer.coded + places.numbers_at(kBits);
  Floats worst = splat(0);
  Ints is_wrong = {0};
  for (int64_t token = 0; token < t.tokens; token++) {
    uint8_t* into = kBits == 8 ? coded + token * channels : small;
    for (int64_t head = 0; head < t.heads; head++) {
      for (int64_t at = 0; at < t.width; at += kLanes) {
        const int count = t.width - at < kLanes ? (int)(t.width - at) : kLanes;
        const uint8_t* from = layer.numbers + token * t.token_stride + head * t.head_stride + at * kBytes;
        const Floats x = load_some<kType>(from, count);
        float* to = row + head * t.width + at;
        if (count == kLanes) {
          memcpy(to, &x, 64);
        } else {
          for (int lane = 0; lane < count; lane++) to[lane] = x[lane];
        }
      }
    }
    for (int64_t column = 0; column < places.columns; column++) {
      const int64_t first = column * size, last = first + size < channels ? first + size : channels;
      Range<kBits> range;
      for (int64_t at = first; at < last; at += kLanes) {
        Floats x;
        if (last - at >= kLanes) {
          memcpy(&x, row + at, 64);
        } else {  // what is no number of the range changes nothing
          x = splat(row[first]);
          for (int lane = 0; lane < last - at; lane++) x[lane] = row[at + lane];
        }
        range.add(x);
      }
      float low = range.low[0], high = range.high[0];
      for (int lane = 1; lane < kLanes && kBits == 4; lane++) {
        low = range.low[lane] < low ? range.low[lane] : low;
        high = range.high[lane] > high ? range.high[lane] : high;
      }
      const float top = top_of(range.top);
      layer.amplitude = top > layer.amplitude ? top : layer.amplitude;
      is_wrong |= range.is_wrong;
      uint8_t scales[64], lows[64];
      const Scale by = scale_of<kType, kBits>(splat(low), splat(high), splat(top), scales, lows);
      memcpy(layer.coded + (token * places.columns + column) * kBytes, scales, kBytes);
      if (kBits == 4) {
        memcpy(layer.coded + places.scales_bytes + (token * places.columns + column) * kBytes, lows, kBytes);
      }
      for (int64_t at = first; at < last; at += kLanes) {
        const int count = last - at < kLanes ? (int)(last - at) : kLanes;
        Floats x, squares, errors;
        if (count == kLanes) {
          memcpy(&x, row + at, 64), memcpy(&squares, layer.squares + at, 64), memcpy(&errors, layer.errors + at, 64);
          const Octets octets = top < kFar * Number<kType>::kMost
                                    ? quantise<kType, kBits, true>(x, by, squares, errors, worst)
                                    : quantise<kType, kBits, false>(x, by, squares, errors, worst);
          memcpy(layer.squares + at, &squares, 64), memcpy(layer.errors + at, &errors, 64);
          memcpy(into + at, &octets, kLanes);
        } else {
          Floats lost = splat(0);
          x = squares = errors = splat(0);
          for (int lane = 0; lane < count; lane++) x[lane] = row[at + lane];
          const Octets octets = quantise<kType, kBits, false>(x, by, squares, errors, lost);
          for (int lane = 0; lane < count; lane++) {
            worst[0] = lost[lane] > worst[0] ? lost[lane] : worst[0];
            layer.squares[at + lane] += squares[lane], layer.errors[at + lane] += errors[lane];
            into[at + lane] = octets[lane];
          }
        }
      }
    }
    if (kBits == 4) pack(small, channels, coded + token * places.row_bytes);
  }
  const float most_lost = top_of(worst);
  layer.worst = most_lost > layer.worst ? most_lost : layer.worst;
  layer.is_sound = layer.is_sound && !any(is_wrong);
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

template <int kType, int kBits>
void decode(const Tensor& t, const uint8_t* coded, uint8_t* numbers, uint8_t* small, float* rows) {
  constexpr int kBytes = Number<kType>::kBytes;
  const Places places(kBits, t, kBytes);
  const int64_t channels = t.heads * t.width, group = kBits == 8 ? 64 : 32;
  const uint8_t* from = coded + places.numbers_at(kBits);
  float *scale = rows, *low = rows + channels + kLanes;
  Floats one_scale = splat(0);  // of all numbers of a token
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
        const float one = load_some<kType>(at + column * kBytes, 1)[0];
        const float lowest = kBits == 8 ? 0 : load_some<kType>(at + places.scales_bytes + column * kBytes, 1)[0];
        is_far = (is_far && column) || !(one * 256 < kFar * Number<kType>::kMost && lowest < kFar * Number<kType>::kMost &&
                                         lowest > -kFar * Number<kType>::kMost && one >= 0);
        const int64_t last = (column + 1) * size < channels ? (column + 1) * size : channels;
        if (kBits == 8 && column == 0) one_scale = splat(one);
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
        for (int64_t channel = 0; channel < t.width; channel++) scale[head * t.width + channel] = one_scale[0];
      }
      if (has_one && !is_far) {
        for (int64_t at = 0; at < whole; at += kLanes) {
          Chars chars;
          memcpy(&chars, octets + at, kLanes);
          Number<kType>::store(to + at * kBytes, floats_of_chars(chars) * one_scale);
        }
      } else if (!is_far) {
        for (int64_t at = 0; at < whole; at += kLanes) {
          Number<kType>::store(to + at * kBytes, number_of<kBits>(octets + at, by + at, plus + at));
        }
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

// Heads that follow one another are one long head.
Tensor merged(Tensor t) {
  const int64_t nbytes = t.type == kF32 ? 4 : 2;
  if (t.heads == 1 || t.head_stride == t.width * nbytes) t.width *= t.heads, t.heads = 1;
  return t;
}

template <int kBits>
void encode_any(const Tensor& t, Layer& layer, uint8_t* small, float* row) {
  const bool by_channel = t.kind == 1;
  if (t.type == kF16) {
    by_channel ? encode_by_channel<kF16, kBits>(t, layer, small) : encode_by_token<kF16, kBits>(t, layer, small, row);
  } else if (t.type == kBF16) {
    by_channel ? encode_by_channel<kBF16, kBits>(t, layer, small) : encode_by_token<kBF16, kBits>(t, layer, small, row);
  } else {
    by_channel ? encode_by_channel<kF32, kBits>(t, layer, small) : encode_by_token<kF32, kBits>(t, layer, small, row);
  }
}

template <int kBits>
void decode_any(const Tensor& t, const uint8_t* coded, uint8_t* numbers, uint8_t* small, float* rows) {
  if (t.type == kF16) {
    decode<kF16, kBits>(t, coded, numbers, small, rows);
  } else if (t.type == kBF16) {
    decode<kBF16, kBits>(t, coded, numbers, small, rows);
  } else {
    decode<kF32, kBits>(t, coded, numbers, small, rows);
  }
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

// Encode `layers` layers to `out`, which has `room` bytes. A layer takes `coded_bytes` bytes, or is copied as it is
// where numbers are not finite, huge, or all tiny. `squares` and `errors` are sums [layer, channel of all tensors],
// `worst` is [layer]. Returns the length, or -1 when it is more than `room` or there is no memory.
extern "C" int64_t kv_quantise(int64_t bits, const Tensor* tensors, int64_t count, const uint8_t* payload, int64_t layers,
                               int64_t layer_bytes, int64_t coded_bytes, uint8_t* out, int64_t room, uint8_t* as_it_is,
                               float* squares, float* errors, float* worst) {
  int64_t written = 0, channels = 0;
  const int64_t widest = widest_of(tensors, count);
  uint8_t* small = (uint8_t*)malloc(widest * 32 + widest * 4);
  if (!small) return -1;
  float* row = (float*)(small + widest * 32);
  for (int64_t at = 0; at < count; at++) channels += tensors[at].heads * tensors[at].width;
  for (int64_t number = 0; number < layers && written >= 0; number++) {
    const uint8_t* whole = payload + number * layer_bytes;
    Layer layer = {whole, out + written, squares + number * channels, errors + number * channels, 0, 0, true};
    if (room - written < coded_bytes) {
      written = -1;
      break;
    }
    for (int64_t at = 0; at < count; at++) {
      const Tensor t = merged(tensors[at]);
      layer.numbers = whole + t.offset;
      if (bits == 8) {
        encode_any<8>(t, layer, small, row);
      } else {
        encode_any<4>(t, layer, small, row);
      }
      layer.coded += Places((int)bits, t, t.type == kF32 ? 4 : 2).nbytes((int)bits, t.tokens);
      layer.squares += t.heads * t.width, layer.errors += t.heads * t.width;
    }
    as_it_is[number] = !layer.is_sound || (layer.amplitude > 0 && layer.amplitude < kTiny);
    worst[number] = layer.worst;
    if (!as_it_is[number]) {
      written += coded_bytes;
    } else if (room - written < layer_bytes) {
      written = -1;
    } else {
      memcpy(out + written, whole, layer_bytes);
      memset(squares + number * channels, 0, channels * 4), memset(errors + number * channels, 0, channels * 4);
      worst[number] = 0;
      written += layer_bytes;
    }
  }
  free(small);
  return written;
}

// Decode one layer of the right length. Returns -1 when there is no memory.
extern "C" int64_t kv_dequantise(int64_t bits, const Tensor* tensors, int64_t count, const uint8_t* coded, int64_t layers,
                                 int64_t coded_bytes, uint8_t* payload, int64_t layer_bytes) {
  const int64_t widest = widest_of(tensors, count);
  uint8_t* small = (uint8_t*)malloc(widest + 2 * widest * 4 + 64);
  if (!small) return -1;
  float* rows = (float*)(small + (widest + 63) / 64 * 64);
  for (int64_t number = 0; number < layers; number++, payload += layer_bytes, coded += coded_bytes) {
    const uint8_t* from = coded;
    for (int64_t at = 0; at < count; at++) {
      const Tensor t = merged(tensors[at]);
      uint8_t* to = payload + t.offset;
      if (bits == 8) {
        decode_any<8>(t, from, to, small, rows);
      } else {
        decode_any<4>(t, from, to, small, rows);
      }
      from += Places((int)bits, t, t.type == kF32 ? 4 : 2).nbytes((int)bits, t.tokens);
    }
  }
  free(small);
  return 0;
}
