// Encodes layers for quantised.py; `quantised.h` says how.
#include "quantised.h"

#include <cstdlib>

namespace {

constexpr float kHuge = 1e18f, kTiny = 1e-15f, kNoScale = 1e-30f;

struct Layer {
  const uint8_t* numbers;   // of the tensor in the layer
  uint8_t* coded;           // of the tensor
  float *squares, *errors;  // sums, by channel
  float amplitude, worst;   // the largest number, the largest error
  bool is_sound;
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

void pack(const uint8_t* small, int64_t count, uint8_t* to) {
  for (int64_t at = 0; at < count / 2; at++) to[at] = (uint8_t)(small[2 * at] | small[2 * at + 1] << 4);
  if (count & 1) to[count / 2] = small[count - 1];
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
