// Decodes blocks for context.py; `context_layout.h` says how.
#include "context_layout.h"

namespace {

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
