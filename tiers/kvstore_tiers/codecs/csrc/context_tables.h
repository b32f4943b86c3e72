// Tables of frequencies for rANS, and their form in a frame: logarithms of the frequencies, each as its difference to the
// one before, in Elias gamma codes.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

constexpr int kScale = 11, kSlots = 1 << kScale;      // the sum of the frequencies of a table
constexpr int kLevels = 4;                            // frequencies are stored as logarithms, so many to an octave

struct Frequencies {
  uint16_t of[256], start[256];
};

// Memory that the caller gave, from its front on.
struct Memory {
  uint8_t* at;
  int64_t left;
  template <typename T>
  T* take(int64_t count) {
    const int64_t nbytes = (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    if (nbytes > left) return nullptr;
    T* found = (T*)at;
    at += nbytes, left -= nbytes;
    return found;
  }
};

// The frequencies whose logarithms are `levels`, 0 for a code that does not occur; false if there is none.
bool frequencies_of(const uint8_t* levels, Frequencies& found) {
  static const uint16_t kSteps[kLevels] = {1024, 1218, 1448, 1722};  // 1024 * 2^(step/4)
  int64_t sum = 0;
  uint32_t wanted[256];
  for (int code = 0; code < 256; code++) {
    const int level = levels[code] - 1;
    wanted[code] = levels[code] ? (uint32_t)kSteps[level % kLevels] << (level / kLevels) : 0;
    sum += wanted[code];
  }
  if (!sum) return false;
  int64_t left = kSlots;
  int widest = -1;
  for (int code = 0; code < 256; code++) {
    int64_t one = wanted[code] ? (int64_t)wanted[code] * kSlots / sum : 0;
    if (wanted[code] && !one) one = 1;
    found.of[code] = (uint16_t)one;
    left -= one;
    if (wanted[code] && (widest < 0 || found.of[code] > found.of[widest])) widest = code;
  }
  while (left < 0) {  // too many ones: take from the widest
    for (int code = 0; code < 256; code++) {
      if (found.of[code] > found.of[widest]) widest = code;
    }
    const int64_t take = found.of[widest] / 2 < -left ? found.of[widest] / 2 : -left;
    if (take < 1) return false;
    found.of[widest] -= (uint16_t)take, left += take;
  }
  found.of[widest] += (uint16_t)left;
  uint16_t at = 0;
  for (int code = 0; code < 256; code++) found.start[code] = at, at += found.of[code];
  return true;
}

struct BitWriter {
  uint8_t *to, *end;
  uint64_t held = 0;
  int count = 0;
  bool fits = true;
  void put(uint32_t bits, int length) {
    held |= (uint64_t)bits << count, count += length;
    while (count >= 8) {
      if (to >= end) { fits = false, count = 0, held = 0; return; }
      *to++ = (uint8_t)held, held >>= 8, count -= 8;
    }
  }
  void put_gamma(uint32_t value) {  // from 0 on
    int length = 31 - __builtin_clz(value + 1);
    put(0, length), put(1, 1), put((value + 1) & ((1u << length) - 1), length);
  }
  void close() { if (count) put(0, 8 - count); }
};

struct BitReader {
  const uint8_t *from, *end;
  uint64_t held = 0;
  int count = 0;
  bool is_sound = true;
  uint32_t get(int length) {
    while (count < length) {
      if (from >= end) { is_sound = false; return 0; }
      held |= (uint64_t)*from++ << count, count += 8;
    }
    uint32_t found = (uint32_t)(held & ((1ull << length) - 1));
    held >>= length, count -= length;
    return found;
  }
  uint32_t get_gamma() {
    int length = 0;
    while (is_sound && !get(1)) {
      if (++length > 16) is_sound = false;
    }
    return is_sound ? ((1u << length) | get(length)) - 1 : 0;
  }
};

uint32_t zigzag(int value) { return value < 0 ? (uint32_t)(-2 * value - 1) : (uint32_t)(2 * value); }
int unzigzag(uint32_t value) { return value & 1 ? -(int)(value / 2) - 1 : (int)(value / 2); }

void put_levels(BitWriter& bits, const uint8_t* levels) {
  int first = 0, last = 255, before = 0;
  while (first < 256 && !levels[first]) first++;
  bits.put(first < 256, 1);
  if (first == 256) return;
  while (!levels[last]) last--;
  bits.put((uint32_t)first, 8), bits.put((uint32_t)last, 8);
  for (int code = first; code <= last; code++) {
    if (!before) {  // a run of zeros, perhaps none, and the level that ends it
      int run = 0;
      while (!levels[code + run]) run++;
      bits.put_gamma((uint32_t)run), code += run;
      bits.put_gamma((uint32_t)levels[code] - 1);
    } else {
      bits.put_gamma(zigzag((int)levels[code] - before));
    }
    before = levels[code];
  }
}

bool get_levels(BitReader& bits, uint8_t* levels) {
  memset(levels, 0, 256);
  if (!bits.get(1)) return bits.is_sound;
  const int first = (int)bits.get(8), last = (int)bits.get(8);
  int before = 0;
  for (int code = first; code <= last && bits.is_sound; code++) {
    int level;
    if (!before) {
      code += (int)bits.get_gamma();
      if (code > last) return false;
      level = (int)bits.get_gamma() + 1;
    } else {
      level = before + unzigzag(bits.get_gamma());
    }
    if (level < 0 || level > (kScale + 1) * kLevels) return false;
    levels[code] = (uint8_t)level, before = level;
  }
  return bits.is_sound;
}

void levels_of(const uint32_t* counts, uint8_t* levels) {
  static const double kBetween[kLevels] = {1117, 1328, 1579, 1878};  // 1024 * 2^((step+1/2)/4)
  double sum = 0;
  for (int code = 0; code < 256; code++) sum += counts[code];
  for (int code = 0; code < 256; code++) {
    double share = counts[code] / (sum > 0 ? sum : 1) * kSlots;
    int level = counts[code] ? 1 : 0;
    for (; share >= 2; share /= 2) level += kLevels;
    for (int step = 0; step < kLevels; step++) level += share * 1024 >= kBetween[step];
    levels[code] = (uint8_t)(counts[code] ? level : 0);
  }
}

}  // namespace
