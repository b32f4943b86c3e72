// Layers of 16-bit floats by rANS, in the context of the channel: for context.py, which describes the form.
//
// The code of a number is its sign, exponent and two bits of the fraction, less the levels of its channel and its token;
// the bits below are stored. A channel belongs to a group, by how its numbers spread and how one-sided their signs are; each group has
// a table of frequencies. Sixteen states work side by side, one for each of sixteen neighbouring channels, so that a row
// decodes as a vector. The order of operations is the form: scalar and vector code give the same bytes.
#pragma once
#include "context_tables.h"
#include "numbers.h"

namespace {

struct Tensor {  // as shapes.py has it
  int64_t kind, type, offset, tokens, heads, width, token_stride, head_stride;
};

constexpr int kGroups = 21, kShared = 24;      // groups; tables that they share, for either sign before
constexpr int kGroupTable = kShared, kLevelTable = kShared + 1, kTokenTable = kShared + 2, kTables = kShared + 3;
constexpr int kStep = 2;                              // of levels: half an octave
constexpr int kMostToken = 60;                        // of the level of a token, in steps either way
constexpr int kZero = 103;                            // the code of a number on the level; code 0 is an exception
constexpr uint32_t kLeast = 1 << 16;                  // of a state

// A group is three times how one-sided its signs are, 0, or 1 to 3 for either side, and how its numbers spread. Groups of
// either side share tables: the signs of those with more minus signs are turned. Each has a table for the numbers behind
// a plus sign, and the next for those behind a minus sign, of the same channel and the token before.
inline int table_of(int group) { return ((group / 3 + 1) / 2 * 3 + group % 3) * 2; }
inline int turned(int group) { return group / 3 > 0 && group / 3 % 2 == 0; }

struct Layout {  // of one tensor in a layer
  Tensor t;
  int64_t channels, chunks, numbers;
  explicit Layout(const Tensor& tensor) : t(tensor) {
    if (t.head_stride == t.width * 2) t.width *= t.heads, t.heads = 1;  // heads that follow one another are one
    channels = t.heads * t.width, chunks = (channels + kLanes - 1) / kLanes, numbers = t.tokens * channels;
  }
  int64_t plane_bytes(int low) const { return t.tokens * chunks * 2 * low; }
  uint32_t active(int64_t chunk) const {
    const int64_t left = channels - chunk * kLanes;
    return left >= kLanes ? 0xffff : (1u << left) - 1;
  }
};

// The states begin with the bits below the last codes of a layer, which then need no bytes: chunks of sixteen, so many.
inline int64_t tail_chunks(int low, const Layout& last) {
  const int64_t most = low == 8 ? 2 : 3;
  return last.t.tokens * last.chunks > most ? most : 0;
}

// The numbers of a token, copied to `row` where heads are apart.
const uint16_t* row_of(const Layout& l, const uint8_t* layer, int64_t token, uint16_t* row) {
  const uint8_t* from = layer + l.t.offset + token * l.t.token_stride;
  if (l.t.heads == 1 && (uintptr_t)from % 2 == 0) return (const uint16_t*)from;
  for (int64_t head = 0; head < l.t.heads; head++) memcpy(row + head * l.t.width, from + head * l.t.head_stride, l.t.width * 2);
  return row;
}

void write_row(const Layout& l, uint8_t* layer, int64_t token, const uint16_t* row) {
  uint8_t* to = layer + l.t.offset + token * l.t.token_stride;
  for (int64_t head = 0; head < l.t.heads; head++) memcpy(to + head * l.t.head_stride, row + head * l.t.width, l.t.width * 2);
}

// The bits below the code: a plane of bytes for float16 (8 bits), nibbles and bits for bfloat16 (5).
void put_low(int low, const uint16_t* row, uint8_t* to) {
  if (low == 8) {
    for (int lane = 0; lane < kLanes; lane++) to[lane] = (uint8_t)row[lane];
    return;
  }
  uint16_t bits = 0;
  for (int lane = 0; lane < 8; lane++) to[lane] = (uint8_t)((row[lane] & 15) | (row[lane + 8] & 15) << 4);
  for (int lane = 0; lane < kLanes; lane++) bits |= (uint16_t)((row[lane] >> 4 & 1) << lane);
  memcpy(to + 8, &bits, 2);
}

inline Halves get_low(int low, const uint8_t* from) {
#if defined(__AVX2__)
  if (low == 8) return (Halves)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
  const __m128i nibbles = _mm_loadl_epi64((const __m128i*)from), lowest = _mm_set1_epi8(15);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(nibbles, 4), lowest);
  uint16_t bits;
  memcpy(&bits, from + 8, 2);
  const __m256i fours = _mm256_cvtepu8_epi16(_mm_unpacklo_epi64(_mm_and_si128(nibbles, lowest), high));
#if defined(__AVX512F__)
  return (Halves)_mm256_or_si256(fours, _mm256_maskz_set1_epi16(bits, 16));
#else
  const __m256i bit_of = (__m256i)Halves{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  const __m256i is_set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16((short)bits), bit_of), bit_of);
  return (Halves)_mm256_or_si256(fours, _mm256_and_si256(is_set, _mm256_set1_epi16(16)));
#endif
#else
  Halves row;
  if (low == 8) {
    for (int lane = 0; lane < kLanes; lane++) row[lane] = from[lane];
    return row;
  }
  uint16_t bits;
  memcpy(&bits, from + 8, 2);
  for (int lane = 0; lane < 8; lane++) row[lane] = from[lane] & 15, row[lane + 8] = from[lane] >> 4;
  for (int lane = 0; lane < kLanes; lane++) row[lane] |= (uint16_t)((bits >> lane & 1) << 4);
  return row;
#endif
}

}  // namespace
