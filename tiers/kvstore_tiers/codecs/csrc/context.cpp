// Layers of 16-bit floats by rANS, in the context of the channel: for context.py, which describes the form.
//
// The code of a number is its sign, exponent and two bits of the fraction, less the level of its channel; the bits below
// are stored. A channel belongs to a group, by how its numbers spread and how one-sided their signs are; each group has
// a table of frequencies. Sixteen states work side by side, one for each of sixteen neighbouring channels, so that a row
// decodes as a vector. The order of operations is the form: scalar and vector code give the same bytes.
#include "context_tables.h"
#include "numbers.h"

#include <cstdlib>

namespace {

struct Tensor {  // as shapes.py has it
  int64_t kind, type, offset, tokens, heads, width, token_stride, head_stride;
};

constexpr int kGroups = 21, kShared = 24;      // groups; tables that they share, for either sign before
constexpr int kGroupTable = kShared, kLevelTable = kShared + 1, kTables = kShared + 2;
constexpr int kStep = 2;                              // of levels: half an octave
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

void read_row(const Layout& l, const uint8_t* layer, int64_t token, uint16_t* row) {
  const uint8_t* from = layer + l.t.offset + token * l.t.token_stride;
  for (int64_t head = 0; head < l.t.heads; head++) memcpy(row + head * l.t.width, from + head * l.t.head_stride, l.t.width * 2);
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

void get_low(int low, const uint8_t* from, uint16_t* row) {
  if (low == 8) {
    for (int lane = 0; lane < kLanes; lane++) row[lane] = from[lane];
    return;
  }
  uint16_t bits;
  memcpy(&bits, from + 8, 2);
  for (int lane = 0; lane < 8; lane++) row[lane] = from[lane] & 15, row[lane + 8] = from[lane] >> 4;
  for (int lane = 0; lane < kLanes; lane++) row[lane] |= (uint16_t)((bits >> lane & 1) << 4);
}

// Frequencies as the coder needs them: `inverse` is 2^64 / share, rounded up, 0 for a share of 1.
struct Shares {
  struct {
    uint64_t inverse;
    uint32_t share, start;
  } of[256];
  void set(const Frequencies& from) {
    for (int code = 0; code < 256; code++) {
      const uint32_t share = from.of[code];
      of[code] = {share > 1 ? ~0ull / share + 1 : 0, share, from.start[code]};
    }
  }
};

// The codes of one tensor in all layers, while a block is encoded.
struct Plan {
  uint8_t* codes;      // [layer, token, channel]
  uint16_t* levels;    // [layer, channel]
  uint8_t* groups;     // [layer, channel]
  Shares* tables;
  const Shares** firsts;  // [layer, channel]: the first table of its group
  uint16_t* bases;     // [layer]: what levels are relative to
};

// Level 0 is that of a channel of zeros alone.
inline uint8_t level_code(int level, int base) { return level ? (uint8_t)((level - base) / kStep) : 0x80; }

int compare(const void* a, const void* b) {
  const float x = *(const float*)a, y = *(const float*)b;
  return (x > y) - (x < y);
}

// Find levels, groups and codes, and count the codes.
bool plan_tensor(int low, const Layout& l, const uint8_t* payload, int64_t layers, int64_t layer_bytes, Plan& plan,
                 uint32_t* counts, Memory memory) {
  const int64_t all = layers * l.channels;
  const bool is_split = l.t.kind != 2;  // V spreads alike in all channels, and its signs come at random
  float* spread = memory.take<float>(all * 2);
  int32_t* sums = memory.take<int32_t>(l.channels * 4);
  uint16_t* row = memory.take<uint16_t>(l.channels + kLanes);
  int32_t* firsts = memory.take<int32_t>(l.channels);
  uint8_t *turns = memory.take<uint8_t>(l.channels), *nothing = memory.take<uint8_t>(l.channels);
  if (!spread || !sums || !row || !firsts || !turns || !nothing) return false;
  memset(nothing, 0, l.channels);
  int32_t *squares = sums + l.channels, *negative = squares + l.channels, *zeros = negative + l.channels;
  for (int64_t layer = 0; layer < layers; layer++) {
    memset(sums, 0, l.channels * 4 * sizeof(int32_t));
    for (int64_t token = 0; token < l.t.tokens; token++) {
      read_row(l, payload + layer * layer_bytes, token, row);
      for (int64_t channel = 0; channel < l.channels; channel++) {
        const int32_t size = (row[channel] & 0x7fff) >> low;
        sums[channel] += size, squares[channel] += size * size, negative[channel] += row[channel] >> 15;
        zeros[channel] += !size;
      }
    }
    int64_t total = 0, living = 0;
    for (int64_t channel = 0; channel < l.channels; channel++) {
      const int32_t side = negative[channel], found = (int32_t)l.t.tokens - zeros[channel];
      const double mean = found ? (double)sums[channel] / found : 0;
      const int64_t at = layer * l.channels + channel;
      plan.levels[at] = (uint16_t)((int)(mean / kStep + 0.5) * kStep), total += plan.levels[at], living += plan.levels[at] > 0;
      spread[at] = found ? (float)((double)squares[channel] / found - mean * mean) : 0;
      const double lean = (side * 2 > l.t.tokens ? side * 2 - l.t.tokens : l.t.tokens - side * 2) * 4 / (double)l.t.tokens;
      plan.groups[at] = lean < 1 ? 0 : (uint8_t)((lean >= 3 ? 3 : (int)lean) * 2 - 1 + (2 * side > l.t.tokens));
    }
    const int32_t base = living ? (int32_t)(total / living) / kStep * kStep : 0;
    plan.bases[layer] = (uint16_t)base;
    for (int64_t channel = 0; channel < l.channels; channel++) {
      uint16_t& level = plan.levels[layer * l.channels + channel];
      if (level && level > base + 127 * kStep) level = (uint16_t)(base + 127 * kStep);
      if (level && level < base - 127 * kStep) level = (uint16_t)(base - 127 * kStep);
    }
  }
  float* sorted = spread + all;
  memcpy(sorted, spread, all * 4);
  qsort(sorted, all, 4, compare);
  for (int64_t at = 0; at < all; at++) {
    int third = 0;
    while (is_split && third < 2 && spread[at] > sorted[all * (third + 1) / 3]) third++;
    plan.groups[at] = (uint8_t)(plan.groups[at] * 3 + third);
  }
  for (int64_t layer = 0; layer < layers; layer++) {
    const uint16_t* levels = plan.levels + layer * l.channels;
    const uint8_t* groups = plan.groups + layer * l.channels;
    for (int64_t channel = 0; channel < l.channels; channel++) {
      counts[kGroupTable * 256 + groups[channel]]++;
      counts[kLevelTable * 256 + level_code(levels[channel], plan.bases[layer])]++;
    }
    for (int64_t channel = 0; channel < l.channels; channel++) {
      firsts[channel] = table_of(groups[channel]) * 256, turns[channel] = (uint8_t)(turned(groups[channel]) << 7);
    }
    for (int64_t token = 0; token < l.t.tokens; token++) {
      read_row(l, payload + layer * layer_bytes, token, row);
      uint8_t* codes = plan.codes + (layer * l.t.tokens + token) * l.channels;
      const uint8_t* before = token && is_split ? codes - l.channels : nothing;
      for (int64_t channel = 0; channel < l.channels; channel++) {
        const int32_t code = ((row[channel] & 0x7fff) >> low) - levels[channel] + kZero;
        codes[channel] = code < 1 || code > 127 ? 0 : (uint8_t)(code | ((row[channel] >> 8 & 128) ^ turns[channel]));
      }
      for (int64_t channel = 0; channel < l.channels; channel++) {
        counts[firsts[channel] + (before[channel] >> 7) * 256 + codes[channel]]++;
      }
    }
  }
  return true;
}

struct Coder {  // writes words from the end of its room towards the front
  uint32_t states[kLanes];
  uint16_t* at;  // there is room for a word of each code

  // Put a code in each of `count` lanes, the last one first, with the table of each.
  inline void put(int count, const Shares* const* tables, const uint8_t* codes) {
    uint16_t* to = at;
    for (int lane = count - 1; lane >= 0; lane--) {
      const auto& by = tables[lane]->of[codes[lane]];
      uint32_t state = states[lane];
      const uint32_t is_full = state >= (uint64_t)by.share << 20;  // without a branch, which could not be foretold
      to[-1] = (uint16_t)state;
      to -= is_full, state >>= is_full * 16;
      const uint32_t whole = by.inverse ? (uint32_t)((unsigned __int128)by.inverse * state >> 64) : state;
      states[lane] = state + by.start + whole * (kSlots - by.share);
    }
    at = to;
  }
};

// Put the codes of a tensor of one layer, the last one first. `tables` and `codes` have room for a row.
void put_codes(const Layout& l, const Plan& plan, int64_t number, Coder& coder, const Shares** tables, uint8_t* row) {
  const uint16_t* levels = plan.levels + number * l.channels;
  const uint8_t *groups = plan.groups + number * l.channels, *codes = plan.codes + number * l.numbers;
  const int tail = (int)(l.channels - (l.chunks - 1) * kLanes);
  for (int64_t token = l.t.tokens - 1; token >= 0; token--) {
    const uint8_t* of_row = codes + token * l.channels;
    for (int64_t channel = 0; channel < l.channels; channel++) {
      tables[channel] = plan.firsts[number * l.channels + channel] + (token ? of_row[channel - l.channels] >> 7 : 0);
    }
    for (int64_t chunk = l.chunks - 1; chunk >= 0; chunk--) {
      coder.put(chunk == l.chunks - 1 ? tail : kLanes, tables + chunk * kLanes, of_row + chunk * kLanes);
    }
  }
  for (int which = 0; which < 2; which++) {  // levels, then groups
    for (int64_t channel = 0; channel < l.channels; channel++) {
      tables[channel] = plan.tables + (which ? kGroupTable : kLevelTable);
      row[channel] = which ? groups[channel] : level_code(levels[channel], plan.bases[number]);
    }
    for (int64_t chunk = l.chunks - 1; chunk >= 0; chunk--) {
      coder.put(chunk == l.chunks - 1 ? tail : kLanes, tables + chunk * kLanes, row + chunk * kLanes);
    }
  }
}

// Write the bits below the codes of a tensor but of the last `tail` chunks, and its exceptions. Returns the end.
uint8_t* put_rest(int low, const Layout& l, const uint8_t* layer, const uint8_t* codes, int64_t tail, bool exceptions,
                  uint8_t* out, uint16_t* row) {
  const int64_t last = l.t.tokens * l.chunks - tail;
  uint8_t *plane = out, *list = out + last * 2 * low;
  memset(row, 0, l.chunks * kLanes * 2);
  for (int64_t token = 0; token < l.t.tokens; token++) {
    read_row(l, layer, token, row);
    for (int64_t chunk = 0; chunk < l.chunks && token * l.chunks + chunk < last; chunk++, plane += 2 * low) {
      put_low(low, row + chunk * kLanes, plane);
    }
    for (int64_t channel = 0; channel < l.channels && exceptions; channel++) {
      if (codes[token * l.channels + channel]) continue;
      const uint32_t place = (uint32_t)(token * l.channels + channel);
      memcpy(list, &place, 4), memcpy(list + 4, row + channel, 2), list += 6;
    }
  }
  return list;
}

void begin_states(int low, const Layout& last, const uint8_t* layer, uint16_t* row, uint32_t* states) {
  const int64_t tail = tail_chunks(low, last), all = last.t.tokens * last.chunks;
  uint16_t words[kLanes] = {0};
  for (int64_t at = all - tail; at < all; at++) {
    memset(row, 0, last.chunks * kLanes * 2);
    read_row(last, layer, at / last.chunks, row);
    put_low(low, row + at % last.chunks * kLanes, (uint8_t*)words + (at - all + tail) * 2 * low);
  }
  for (int lane = 0; lane < kLanes; lane++) states[lane] = kLeast | words[lane];
}

struct RowScratch {
  const Shares** tables;
  uint8_t* codes;
};

// Encode one layer. Returns its length, 0 when it does not fit.
int64_t encode_layer(int low, const Tensor* tensors, int64_t count, const uint8_t* layer, const Plan* plans, int64_t number,
                     uint8_t* out, int64_t room, uint16_t* words, int64_t most_words, const RowScratch& scratch) {
  Coder coder;
  coder.at = words + most_words;
  bool any[16] = {false};  // of its tensors, of which there are no more: whether they have exceptions
  const Layout last(tensors[count - 1]);
  begin_states(low, last, layer, words, coder.states);
  int64_t nbytes = 4 + 6 * count + 64 - tail_chunks(low, last) * 2 * low;
  for (int64_t at = count - 1; at >= 0; at--) {
    const Layout l(tensors[at]);
    const uint8_t* codes = plans[at].codes + number * l.numbers;
    put_codes(l, plans[at], number, coder, scratch.tables, scratch.codes);
    uint32_t exceptions = 0;  // counted as bytes are compared
    for (int64_t place = 0; place < l.numbers; place++) exceptions += !codes[place];
    any[at] = exceptions > 0;
    nbytes += l.plane_bytes(low) + 6 * (int64_t)exceptions;
    if (nbytes > room) return 0;
    memcpy(out + 4 + 6 * at, &exceptions, 4), memcpy(out + 8 + 6 * at, plans[at].bases + number, 2);
  }
  const uint32_t words_bytes = (uint32_t)((words + most_words - coder.at) * 2);
  nbytes += words_bytes;
  if (nbytes > room) return 0;
  uint8_t* to = out + 4 + 6 * count;
  memcpy(out, &words_bytes, 4), memcpy(to, coder.states, 64), memcpy(to + 64, coder.at, words_bytes);
  to += 64 + words_bytes;
  for (int64_t at = 0; at < count; at++) {  // the words are no longer needed: there is room for a row
    const Layout l(tensors[at]);
    const int64_t tail = at == count - 1 ? tail_chunks(low, last) : 0;
    to = put_rest(low, l, layer, plans[at].codes + number * l.numbers, tail, any[at], to, words);
  }
  return nbytes;
}

struct Reader {  // sixteen states, and the words that feed them
  uint32_t states[kLanes];
  const uint8_t *at, *end;
  bool is_sound = true;

  // Decode a code for each lane of `active`, with the tables at `bases` in `slots`.
  // `bases` then have the tables for the next token: those behind the signs of these codes.
  inline void get(const uint32_t* slots, uint32_t* bases, uint32_t active, uint8_t* codes) {
#if defined(__AVX512F__)
    const __mmask16 lanes = (__mmask16)active;
    __m512i state = _mm512_loadu_si512(states);
    const __m512i base = _mm512_loadu_si512(bases);
    const __m512i place = _mm512_add_epi32(_mm512_and_si512(state, _mm512_set1_epi32(kSlots - 1)), base);
    const __m512i slot = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, place, slots, 4);
    _mm_storeu_si128((__m128i*)codes, _mm512_cvtepi32_epi8(slot));
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi32(slot, kScale - 7), _mm512_set1_epi32(kSlots));
    _mm512_storeu_si512(bases, _mm512_or_si512(_mm512_andnot_si512(_mm512_set1_epi32(kSlots), base), sign));
    const __m512i share = _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(slot, 8), _mm512_set1_epi32(4095)), _mm512_set1_epi32(1));
    const __m512i next = _mm512_add_epi32(_mm512_mullo_epi32(share, _mm512_srli_epi32(state, kScale)), _mm512_srli_epi32(slot, 20));
    const __mmask16 low = _mm512_mask_cmplt_epu32_mask(lanes, next, _mm512_set1_epi32(kLeast));
    uint16_t some[kLanes] = {0};
    const uint8_t* from = at;
    if (end - at < 32) memcpy(some, at, end - at), from = (const uint8_t*)some;
    const __m512i words = _mm512_maskz_expand_epi32(low, _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)));
    const __m512i fed = _mm512_or_si512(_mm512_slli_epi32(next, 16), words);
    state = _mm512_mask_mov_epi32(state, lanes, _mm512_mask_mov_epi32(next, low, fed));
    _mm512_storeu_si512(states, state);
    const int64_t used = 2 * __builtin_popcount(low);
    if (end - at < used) is_sound = false; else at += used;
#else
    for (int lane = 0; lane < kLanes; lane++) {
      if (!(active >> lane & 1)) continue;
      const uint32_t slot = slots[bases[lane] + (states[lane] & (kSlots - 1))];
      uint32_t state = ((slot >> 8 & 4095) + 1) * (states[lane] >> kScale) + (slot >> 20);
      if (state < kLeast) {
        uint16_t word = 0;
        if (end - at < 2) {
          is_sound = false;
        } else {
          memcpy(&word, at, 2), at += 2;
        }
        state = state << 16 | word;
      }
      codes[lane] = (uint8_t)slot, states[lane] = state;
      bases[lane] = (bases[lane] & ~(uint32_t)kSlots) | (slot >> 7 & 1) << kScale;
    }
#endif
  }
};

// Sixteen numbers of their codes and the bits below.
inline void join(int low, const uint8_t* codes, const int32_t* levels, const uint16_t* turns, const uint16_t* below, uint16_t* numbers) {
  for (int lane = 0; lane < kLanes; lane++) {
    const int32_t size = (codes[lane] & 127) - kZero + levels[lane];
    numbers[lane] = (uint16_t)(((codes[lane] & 128) << 8 | ((uint32_t)size << low & 0x7fff) | below[lane]) ^ turns[lane]);
  }
}

struct Tables {
  uint32_t* slots;  // code, frequency - 1 in 12 bits, place among the slots of its code in 12 bits
  uint8_t is_there[kTables];
};

struct Scratch {  // of one row: tables and levels by channel, and the numbers
  uint32_t* bases;
  int32_t* levels;
  uint16_t *turns, *row;
};

// Decode a tensor of one layer, whose bits below the codes are at `plane`, but for the last `tail` chunks, and whose
// exceptions follow them.
bool decode_tensor(int low, const Layout& l, const Tables& tables, Reader& reader, int32_t level, const uint8_t* plane,
                   int64_t tail, int64_t exceptions, uint8_t* layer, const Scratch& scratch) {
  static const uint8_t kNothing[2 * 8] = {0};
  const int64_t last = l.t.tokens * l.chunks - tail;
  if (!tables.is_there[kGroupTable] || !tables.is_there[kLevelTable]) return false;
  uint32_t same[kLanes];
  uint8_t codes[kLanes] = {0};
  for (int64_t chunk = 0; chunk < l.chunks; chunk++) {
    for (int lane = 0; lane < kLanes; lane++) same[lane] = kGroupTable * kSlots;
    const uint32_t active = l.active(chunk);
    reader.get(tables.slots, same, active, codes);
    for (int lane = 0; lane < kLanes; lane++) {
      const bool is_used = active >> lane & 1;
      const int table = table_of(codes[lane]);
      if (is_used && codes[lane] >= kGroups) return false;
      scratch.bases[chunk * kLanes + lane] = is_used ? table * kSlots : 0;
      scratch.turns[chunk * kLanes + lane] = (uint16_t)(turned(codes[lane]) << 15);
    }
  }
  for (int64_t chunk = 0; chunk < l.chunks; chunk++) {
    for (int lane = 0; lane < kLanes; lane++) same[lane] = kLevelTable * kSlots;
    reader.get(tables.slots, same, l.active(chunk), codes);
    for (int lane = 0; lane < kLanes; lane++) {
      scratch.levels[chunk * kLanes + lane] = codes[lane] == 0x80 ? 0 : level + (int8_t)codes[lane] * kStep;
    }
  }
  for (int64_t token = 0; token < l.t.tokens; token++) {
    for (int64_t chunk = 0; chunk < l.chunks; chunk++) {
      const bool is_there = token * l.chunks + chunk < last;
      uint16_t below[kLanes];
      uint32_t* bases = scratch.bases + chunk * kLanes;
      reader.get(tables.slots, bases, l.active(chunk), codes);
      get_low(low, is_there ? plane : kNothing, below);
      plane += is_there ? 2 * low : 0;
      join(low, codes, scratch.levels + chunk * kLanes, scratch.turns + chunk * kLanes, below, scratch.row + chunk * kLanes);
    }
    write_row(l, layer, token, scratch.row);
  }
  for (int64_t number = 0; number < exceptions; number++, plane += 6) {
    uint32_t place;
    memcpy(&place, plane, 4);
    if (place >= l.numbers) return false;
    const int64_t token = place / l.channels, channel = place % l.channels;
    uint8_t* to = layer + l.t.offset + token * l.t.token_stride + channel / l.t.width * l.t.head_stride;
    memcpy(to + channel % l.t.width * 2, plane + 4, 2);
  }
  return reader.is_sound;
}

// Add the bits below the last codes, which are what the states began with. False if they cannot have.
bool end_states(int low, const Layout& last, const uint32_t* states, uint8_t* layer) {
  const int64_t tail = tail_chunks(low, last), all = last.t.tokens * last.chunks;
  uint16_t words[kLanes];
  for (int lane = 0; lane < kLanes; lane++) {
    if (states[lane] >> 16 != 1) return false;
    words[lane] = (uint16_t)states[lane];
  }
  for (int64_t at = all - tail; at < all; at++) {
    uint16_t below[kLanes];
    get_low(low, (const uint8_t*)words + (at - all + tail) * 2 * low, below);
    for (int lane = 0; lane < kLanes && last.active(at % last.chunks) >> lane & 1; lane++) {
      const int64_t channel = at % last.chunks * kLanes + lane;
      uint8_t* to = layer + last.t.offset + at / last.chunks * last.t.token_stride + channel / last.t.width * last.t.head_stride;
      uint16_t number;
      memcpy(&number, to + channel % last.t.width * 2, 2);
      number |= below[lane];
      memcpy(to + channel % last.t.width * 2, &number, 2);
    }
  }
  return true;
}

// Decode one layer from the `size` bytes at `from`.
bool decode_layer(int low, const Tensor* tensors, int64_t count, const Tables* tables, const uint8_t* from, int64_t size,
                  uint8_t* layer, const Scratch& scratch) {
  uint32_t words_bytes;
  const int64_t head_bytes = 4 + 6 * count + 64;
  if (size < head_bytes) return false;
  memcpy(&words_bytes, from, 4);
  int64_t at = head_bytes + words_bytes;
  if (words_bytes % 2 || at > size) return false;
  Reader reader;
  memcpy(reader.states, from + head_bytes - 64, 64);
  reader.at = from + head_bytes, reader.end = from + at;
  for (int64_t number = 0; number < count; number++) {
    const Layout l(tensors[number]);
    uint32_t exceptions;
    uint16_t level;
    memcpy(&exceptions, from + 4 + 6 * number, 4), memcpy(&level, from + 8 + 6 * number, 2);
    const int64_t tail = number == count - 1 ? tail_chunks(low, l) : 0;
    const int64_t rest = l.plane_bytes(low) - tail * 2 * low + 6 * (int64_t)exceptions;
    if (rest > size - at) return false;
    if (!decode_tensor(low, l, tables[number], reader, level, from + at, tail, exceptions, layer, scratch)) return false;
    at += rest;
  }
  return at == size && end_states(low, Layout(tensors[count - 1]), reader.states, layer);
}

bool read_tables(BitReader& bits, Tables& tables) {
  uint8_t levels[256] = {0};
  for (int table = 0; table < kTables; table++) {
    Frequencies found;
    if (!bits.get(1) && !get_levels(bits, levels)) return false;  // 1: it is the table before again
    tables.is_there[table] = frequencies_of(levels, found);
    uint32_t* slot = tables.slots + table * kSlots;
    for (int code = 0; code < 256 && tables.is_there[table]; code++) {
      for (uint32_t place = 0; place < found.of[code]; place++) {
        *slot++ = (uint32_t)code | (uint32_t)(found.of[code] - 1) << 8 | place << 20;
      }
    }
  }
  return bits.is_sound;
}

}  // namespace

// Encode a block: tables to the front of `out`, then the layers. `low` is 8 for float16, 5 for bfloat16. Fills `lengths`
// and `as_it_is` by layer, and `tables_bytes`. Returns the length, -1 when it is more than `room`, -2 when `work` is
// too small.
extern "C" int64_t kv_context_encode(int64_t low, const Tensor* tensors, int64_t count, const uint8_t* payload, int64_t layers,
                                     int64_t layer_bytes, uint8_t* out, int64_t room, int64_t* lengths, uint8_t* as_it_is,
                                     int64_t* tables_bytes, uint8_t* work, int64_t work_bytes) {
  int64_t most = 0, written = 0;
  for (int64_t at = 0; at < count; at++) {
    const Layout l(tensors[at]);  // a word for each code at most, or a row
    most += l.numbers + 2 * l.channels + 2 * kLanes;
  }
  Memory memory = {work, work_bytes};
  Plan* plans = memory.take<Plan>(count);
  uint32_t* counts = memory.take<uint32_t>(kTables * 256);
  uint16_t* words = memory.take<uint16_t>(most);
  const RowScratch scratch = {memory.take<const Shares*>(most), memory.take<uint8_t>(most)};
  bool is_sound = plans && counts && words && scratch.tables && scratch.codes;
  BitWriter bits = {out, out + room};
  for (int64_t at = 0; at < count && is_sound; at++) {
    const Layout l(tensors[at]);
    Plan& plan = plans[at];
    plan.codes = memory.take<uint8_t>(layers * l.numbers), plan.levels = memory.take<uint16_t>(layers * l.channels);
    plan.groups = memory.take<uint8_t>(layers * l.channels), plan.bases = memory.take<uint16_t>(layers);
    plan.tables = memory.take<Shares>(kTables), plan.firsts = memory.take<const Shares*>(layers * l.channels);
    memset(counts, 0, kTables * 256 * 4);
    is_sound = plan.codes && plan.levels && plan.groups && plan.bases && plan.tables && plan.firsts &&
               plan_tensor((int)low, l, payload, layers, layer_bytes, plan, counts, memory);
    uint8_t levels[256];
    for (int table = 0; table < kTables && is_sound; table++) {
      const bool is_again = table % 2 && table < kShared && l.t.kind == 2;
      if (!is_again) levels_of(counts + table * 256, levels);
      Frequencies found = {};
      frequencies_of(levels, found);
      plan.tables[table].set(found);
      bits.put(is_again, 1);
      if (!is_again) put_levels(bits, levels);
    }
  }
  for (int64_t at = 0; at < count && is_sound; at++) {
    for (int64_t place = 0; place < layers * Layout(tensors[at]).channels; place++) {
      plans[at].firsts[place] = plans[at].tables + table_of(plans[at].groups[place]);
    }
  }
  if (is_sound) bits.close();
  *tables_bytes = written = bits.to - out;
  for (int64_t layer = 0; layer < layers && is_sound && bits.fits && written >= 0; layer++) {
    const uint8_t* whole = payload + layer * layer_bytes;
    const int64_t left = room - written < layer_bytes ? room - written : layer_bytes;
    lengths[layer] = encode_layer((int)low, tensors, count, whole, plans, layer, out + written, left, words, most, scratch);
    as_it_is[layer] = !lengths[layer];
    if (as_it_is[layer] && left < layer_bytes) {
      written = -1;
    } else if (as_it_is[layer]) {
      memcpy(out + written, whole, layer_bytes), lengths[layer] = layer_bytes;
    }
    written += written < 0 ? 0 : lengths[layer];
  }
  return !is_sound ? -2 : bits.fits ? written : -1;
}

// Decode layers, the places of which in `stored` are `places`, one more than `layers`; `tables` are at its front. Returns
// 0, -1 for bytes that `kv_context_encode` does not write, -2 when `work` is too small.
extern "C" int64_t kv_context_decode(int64_t low, const Tensor* tensors, int64_t count, const uint8_t* tables,
                                     int64_t tables_bytes, const uint8_t* stored, const int64_t* places, int64_t layers,
                                     uint8_t* payload, int64_t layer_bytes, uint8_t* work, int64_t work_bytes) {
  int64_t widest = 0;
  for (int64_t at = 0; at < count; at++) {
    const int64_t channels = Layout(tensors[at]).chunks * kLanes;
    widest = channels > widest ? channels : widest;
  }
  Memory memory = {work, work_bytes};
  Tables* read = memory.take<Tables>(count);
  uint32_t* slots = memory.take<uint32_t>(count * kTables * kSlots);
  uint32_t* bases = memory.take<uint32_t>(widest * 4);
  int64_t answer = read && slots && bases ? 0 : -2;
  BitReader bits = {tables, tables + tables_bytes};
  for (int64_t at = 0; at < count && !answer; at++) {
    read[at].slots = slots + at * kTables * kSlots;
    if (!read_tables(bits, read[at])) answer = -1;
  }
  const Scratch scratch = {bases, (int32_t*)(bases + widest), (uint16_t*)(bases + 2 * widest), (uint16_t*)(bases + 3 * widest)};
  for (int64_t layer = 0; layer < layers && !answer; layer++) {
    const uint8_t* from = stored + places[layer];
    if (!decode_layer((int)low, tensors, count, read, from, places[layer + 1] - places[layer], payload + layer * layer_bytes,
                      scratch)) {
      answer = -1;
    }
  }
  return answer;
}
