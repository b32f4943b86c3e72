// Decodes blocks for context.py; `context_layout.h` says how.
#include "context_layout.h"

namespace {

struct Tables {
  uint32_t* slots;  // code, frequency - 1 in 12 bits, place among the slots of its code in 12 bits
  uint8_t is_there[kTables];
};

struct Row {  // of one layer, by channel: tables, levels, marks of those that are not all zeros, and numbers
  uint32_t* bases;
  uint16_t *levels, *marks, *turns, *numbers;
  int8_t* tokens;  // their levels
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// Where the words go that feed eight states: for each mask of states that want one, the number of its word.
struct Expansion {
  uint8_t of[256][8];
};
constexpr Expansion expansion() {
  Expansion found = {};
  for (int mask = 0; mask < 256; mask++) {
    for (int lane = 0, word = 0; lane < 8; lane++) found.of[mask][lane] = (uint8_t)word, word += mask >> lane & 1;
  }
  return found;
}
constexpr Expansion kExpansion = expansion();

struct States {
  __m256i half[2];
};

// Decode a code for each of eight states; `next` are these states, but for the words that those in `wanting` still need.
struct Eight {
  __m256i slot, next, is_low;
  uint32_t wanting;

  __attribute__((always_inline)) inline Eight(const uint32_t* slots, uint32_t* bases, __m256i state, __m256i lanes) {
    const __m256i base = _mm256_loadu_si256((const __m256i*)bases), second = _mm256_set1_epi32(kSlots);
    const __m256i place = _mm256_add_epi32(_mm256_and_si256(state, _mm256_set1_epi32(kSlots - 1)), base);
    slot = _mm256_i32gather_epi32((const int*)slots, place, 4);
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(slot, kScale - 7), second);
    _mm256_storeu_si256((__m256i*)bases, _mm256_or_si256(_mm256_andnot_si256(second, base), sign));
    const __m256i share = _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(slot, 8), _mm256_set1_epi32(4095)), _mm256_set1_epi32(1));
    next = _mm256_add_epi32(_mm256_mullo_epi32(share, _mm256_srli_epi32(state, kScale)), _mm256_srli_epi32(slot, 20));
    next = _mm256_blendv_epi8(state, next, lanes);
    is_low = _mm256_cmpeq_epi32(_mm256_srli_epi32(next, 16), _mm256_setzero_si256());
    wanting = (uint32_t)_mm256_movemask_ps((__m256)is_low);
  }

  __attribute__((always_inline)) inline __m256i fed(const uint8_t* from) const {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
    const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kExpansion.of[wanting]));
    const __m256i full = _mm256_or_si256(_mm256_slli_epi32(next, 16), _mm256_permutevar8x32_epi32(words, order));
    return _mm256_blendv_epi8(next, full, is_low);
  }
};
#else
typedef Words States;
#endif

struct Layer {  // sixteen states, the words that feed them, and what they are decoded to
  States states;
  const uint8_t *at, *end, *rest;  // words; the bits below the codes, and exceptions
  uint8_t* numbers;
  int64_t tail, exceptions;
  int level;
  bool is_sound;
  Row row;

  // Decode a code for each lane of `active`, with the tables at `bases` in `slots`, to the lowest bytes of the result.
  // `bases` then have the tables for the next token: those behind the signs of these codes.
  __attribute__((always_inline)) inline Halves get(const uint32_t* slots, uint32_t* bases, uint32_t active) {
#if defined(__AVX512F__)
    const __mmask16 lanes = (__mmask16)active;
    const __m512i state = (__m512i)states, base = _mm512_loadu_si512(bases);
    const __m512i place = _mm512_add_epi32(_mm512_and_si512(state, _mm512_set1_epi32(kSlots - 1)), base);
    const __m512i slot = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, place, slots, 4);
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
    states = (Words)_mm512_mask_mov_epi32(state, lanes, _mm512_mask_mov_epi32(next, low, fed));
    const int64_t used = 2 * __builtin_popcount(low);
    if (end - at < used) is_sound = false; else at += used;
    return (Halves)_mm512_cvtepi32_epi16(slot);
#elif defined(__AVX2__)
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i first = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)active), bits), bits);
    const __m256i second = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)(active >> 8)), bits), bits);
    const Eight low(slots, bases, states.half[0], first), high(slots, bases + 8, states.half[1], second);
    const int64_t used_low = 2 * __builtin_popcount(low.wanting), used = used_low + 2 * __builtin_popcount(high.wanting);
    uint16_t some[kLanes] = {0};
    const uint8_t* from = at;
    if (end - at < 32) memcpy(some, at, end - at), from = (const uint8_t*)some;
    states.half[0] = low.fed(from), states.half[1] = high.fed(from + used_low);
    if (end - at < used) is_sound = false; else at += used;
    const __m256i lowest = _mm256_set1_epi32(255);
    const __m256i codes = _mm256_packus_epi32(_mm256_and_si256(low.slot, lowest), _mm256_and_si256(high.slot, lowest));
    return (Halves)_mm256_permute4x64_epi64(codes, 0xd8);
#else
    Halves codes = {0};
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
      codes[lane] = (uint16_t)slot, states[lane] = state;
      bases[lane] = (bases[lane] & ~(uint32_t)kSlots) | (slot >> 7 & 1) << kScale;
    }
    return codes;
#endif
  }

  // Decode sixteen codes, or less, all with one table.
  void get_all(const uint32_t* slots, int table, int64_t left, uint8_t* codes) {
    uint32_t same[kLanes];
    for (int lane = 0; lane < kLanes; lane++) same[lane] = (uint32_t)table * kSlots;
    const int count = left < kLanes ? (int)left : kLanes;
    const Halves found = get(slots, same, (1u << count) - 1);
    for (int lane = 0; lane < count; lane++) codes[lane] = (uint8_t)found[lane];
  }
};

// Decode the groups and levels of a tensor, which come first.
void begin_tensor(const Layout& l, const Tables& tables, Layer& layer) {
  const Row& row = layer.row;
  uint8_t codes[kLanes];
  for (int64_t first = 0; first < l.channels; first += kLanes) {
    layer.get_all(tables.slots, kGroupTable, l.channels - first, codes);
    for (int lane = 0; lane < kLanes; lane++) {
      const bool is_used = first + lane < l.channels;
      layer.is_sound = layer.is_sound && (!is_used || codes[lane] < kGroups);
      row.bases[first + lane] = is_used && layer.is_sound ? (uint32_t)table_of(codes[lane]) * kSlots : 0;
      row.turns[first + lane] = is_used && turned(codes[lane]) ? 0x8000 : 0;
    }
  }
  for (int64_t first = 0; first < l.channels; first += kLanes) {
    layer.get_all(tables.slots, kLevelTable, l.channels - first, codes);
    for (int lane = 0; lane < kLanes && first + lane < l.channels; lane++) {
      const bool is_living = codes[lane] != 0x80;
      row.levels[first + lane] = (uint16_t)((is_living ? layer.level + (int8_t)codes[lane] * kStep : 0) - kZero);
      row.marks[first + lane] = is_living ? 0xffff : 0;
    }
  }
  for (int64_t first = 0; first < l.t.tokens; first += kLanes) {
    layer.get_all(tables.slots, kTokenTable, l.t.tokens - first, (uint8_t*)row.tokens + first);
  }
}

// Decode the numbers of a tensor of kCount layers side by side: each waits for its own states alone.
template <int kLow, int kCount>
void decode_numbers(const Layout& l, const uint32_t* slots, Layer* layers) {
  static const uint8_t kNothing[2 * 8] = {0};
  const int64_t last = l.t.tokens * l.chunks - layers[0].tail;
  Layer each[kCount];
  for (int number = 0; number < kCount; number++) each[number] = layers[number];
  for (int64_t token = 0; token < l.t.tokens; token++) {
    for (int64_t chunk = 0; chunk < l.chunks; chunk++) {
      const bool is_there = token * l.chunks + chunk < last;
      const uint32_t active = l.active(chunk);
      for (int number = 0; number < kCount; number++) {
        Layer& layer = each[number];
        const int64_t first = chunk * kLanes;
        Halves levels, marks, turns;
        const Halves codes = layer.get(slots, layer.row.bases + first, active);
        const Halves lows = get_low(kLow, is_there ? layer.rest : kNothing);
        layer.rest += is_there ? 2 * kLow : 0;
        memcpy(&levels, layer.row.levels + first, 32);
        memcpy(&marks, layer.row.marks + first, 32), memcpy(&turns, layer.row.turns + first, 32);
        const Halves size = (codes & 127) + levels + (marks & (uint16_t)(layer.row.tokens[token] * kStep));
        const Halves found = ((codes & 128) << 8 | (size << kLow & 0x7fff) | lows) ^ turns;
        memcpy(layer.row.numbers + first, &found, 32);
      }
    }
    for (int number = 0; number < kCount; number++) write_row(l, each[number].numbers, token, each[number].row.numbers);
  }
  for (int number = 0; number < kCount; number++) layers[number] = each[number];
}

bool put_exceptions(const Layout& l, Layer& layer) {
  for (int64_t number = 0; number < layer.exceptions; number++, layer.rest += 6) {
    uint32_t place;
    memcpy(&place, layer.rest, 4);
    if (place >= l.numbers) return false;
    const int64_t token = place / l.channels, channel = place % l.channels;
    uint8_t* to = layer.numbers + l.t.offset + token * l.t.token_stride + channel / l.t.width * l.t.head_stride;
    memcpy(to + channel % l.t.width * 2, layer.rest + 4, 2);
  }
  return true;
}

// Add the bits below the last codes, which are what the states began with. False if they cannot have.
bool end_states(int low, const Layout& last, const States& ended, uint8_t* layer) {
  const int64_t tail = tail_chunks(low, last), all = last.t.tokens * last.chunks;
  uint16_t words[kLanes];
  uint32_t states[kLanes];
  memcpy(states, &ended, sizeof states);
  for (int lane = 0; lane < kLanes; lane++) {
    if (states[lane] >> 16 != 1) return false;
    words[lane] = (uint16_t)states[lane];
  }
  for (int64_t at = all - tail; at < all; at++) {
    const Halves below = get_low(low, (const uint8_t*)words + (at - all + tail) * 2 * low);
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

constexpr int kTogether = 2;  // layers: each step of one waits for the step before

// Decode `count` layers, 1 or kTogether, the bytes of which begin at `places` in `stored`.
bool decode_layers(int low, const Tensor* tensors, int64_t tensor_count, const Tables* tables, const uint8_t* stored,
                   const int64_t* places, int count, uint8_t* payload, int64_t layer_bytes, const Row* rows) {
  Layer layers[kTogether];
  const uint8_t* heads[kTogether];
  const int64_t head_bytes = 4 + 6 * tensor_count + 64;
  for (int number = 0; number < count; number++) {
    Layer& layer = layers[number];
    const uint8_t* from = heads[number] = stored + places[number];
    const int64_t size = places[number + 1] - places[number];
    uint32_t words_bytes;
    if (size < head_bytes) return false;
    memcpy(&words_bytes, from, 4);
    if (words_bytes % 2 || words_bytes > size - head_bytes) return false;
    memcpy(&layer.states, from + head_bytes - 64, 64);
    layer.at = from + head_bytes, layer.rest = layer.end = layer.at + words_bytes;
    layer.numbers = payload + number * layer_bytes, layer.row = rows[number], layer.is_sound = true;
  }
  for (int64_t at = 0; at < tensor_count; at++) {
    const Layout l(tensors[at]);
    if (!tables[at].is_there[kGroupTable] || !tables[at].is_there[kLevelTable] || !tables[at].is_there[kTokenTable]) return false;
    for (int number = 0; number < count; number++) {
      Layer& layer = layers[number];
      uint32_t exceptions;
      uint16_t level;
      memcpy(&exceptions, heads[number] + 4 + 6 * at, 4), memcpy(&level, heads[number] + 8 + 6 * at, 2);
      layer.tail = at == tensor_count - 1 ? tail_chunks(low, l) : 0, layer.exceptions = exceptions, layer.level = level;
      const int64_t rest = l.plane_bytes(low) - layer.tail * 2 * low + 6 * layer.exceptions;
      if (rest > stored + places[number + 1] - layer.rest) return false;
      begin_tensor(l, tables[at], layer);
    }
    if (low == 8) {
      count == 1 ? decode_numbers<8, 1>(l, tables[at].slots, layers) : decode_numbers<8, kTogether>(l, tables[at].slots, layers);
    } else {
      count == 1 ? decode_numbers<5, 1>(l, tables[at].slots, layers) : decode_numbers<5, kTogether>(l, tables[at].slots, layers);
    }
    for (int number = 0; number < count; number++) {
      if (!put_exceptions(l, layers[number]) || !layers[number].is_sound) return false;
    }
  }
  bool is_sound = true;
  for (int number = 0; number < count; number++) {
    is_sound = is_sound && layers[number].rest == stored + places[number + 1] &&
               end_states(low, Layout(tensors[tensor_count - 1]), layers[number].states, layers[number].numbers);
  }
  return is_sound;
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
  int64_t widest = 0, tokens = 0;
  for (int64_t at = 0; at < count; at++) {
    const int64_t channels = Layout(tensors[at]).chunks * kLanes;
    widest = channels > widest ? channels : widest, tokens = tensors[at].tokens > tokens ? tensors[at].tokens : tokens;
  }
  Memory memory = {work, work_bytes};
  Tables* read = memory.take<Tables>(count);
  uint32_t* slots = memory.take<uint32_t>(count * kTables * kSlots);
  Row rows[kTogether];
  bool is_enough = read && slots;
  for (Row& row : rows) {
    row.bases = memory.take<uint32_t>(widest), row.levels = memory.take<uint16_t>(widest);
    row.marks = memory.take<uint16_t>(widest), row.turns = memory.take<uint16_t>(widest);
    row.numbers = memory.take<uint16_t>(widest), row.tokens = memory.take<int8_t>(tokens + kLanes);
    is_enough = is_enough && row.bases && row.levels && row.marks && row.turns && row.numbers && row.tokens;
  }
  int64_t answer = is_enough ? 0 : -2;
  BitReader bits = {tables, tables + tables_bytes};
  for (int64_t at = 0; at < count && !answer; at++) {
    read[at].slots = slots + at * kTables * kSlots;
    if (!read_tables(bits, read[at])) answer = -1;
  }
  for (int64_t layer = 0; layer < layers && !answer;) {
    const int together = layers - layer < kTogether ? 1 : kTogether;
    const bool is_sound = decode_layers((int)low, tensors, count, read, stored, places + layer, together,
                                        payload + layer * layer_bytes, layer_bytes, rows);
    answer = is_sound ? 0 : -1, layer += together;
  }
  return answer;
}
