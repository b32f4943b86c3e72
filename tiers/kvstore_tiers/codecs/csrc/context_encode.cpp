// Encodes blocks for context.py; `context_layout.h` says how.
#include "context_layout.h"

namespace {

// The codes of one tensor in all layers, while a block is encoded.
struct Plan {
  uint8_t* codes;      // [layer, token, channel]
  uint16_t* levels;    // [layer, channel]
  uint8_t* groups;     // [layer, channel]
  int8_t* tokens;      // [layer, token]: their levels, in steps
  uint32_t* shares;    // [table, code]: frequency, and above 16 bits the first slot
  uint32_t* firsts;    // [layer, channel]: 256 times the first table of its group
  uint16_t* bases;     // [layer]: what levels are relative to
};

// Level 0 is that of a channel of zeros alone.
inline uint8_t level_code(int level, int base) { return level ? (uint8_t)((level - base) / kStep) : 0x80; }

// Find what a third, and two thirds, of the `count` numbers are not above: to a sixteenth of an octave.
void find_thirds(const float* numbers, int64_t count, float* thirds) {
  constexpr int kBelow = 19;
  static thread_local uint32_t counts[1 << (31 - kBelow)];
  memset(counts, 0, sizeof counts);
  for (int64_t at = 0; at < count; at++) {
    uint32_t bits;
    memcpy(&bits, numbers + at, 4), counts[(bits & 0x7fffffff) >> kBelow]++;
  }
  int64_t seen = 0;
  uint32_t place = 0;
  for (int third = 0; third < 2; third++) {
    while (seen <= count * (third + 1) / 3 && place < 1 << (31 - kBelow)) seen += counts[place++];
    const uint32_t bits = (place << kBelow) - 1;
    memcpy(thirds + third, &bits, 4);
  }
}

// Find the levels of the tokens of a layer: what numbers are above the levels of their channels, on average.
void find_tokens(int low, const Layout& l, const uint8_t* layer, const uint16_t* levels, uint16_t* row, int8_t* tokens) {
  for (int64_t token = 0; token < l.t.tokens; token++) {
    const uint16_t* numbers = row_of(l, layer, token, row);
    int32_t above = 0, found = 0;
    for (int64_t channel = 0; channel < l.channels; channel++) {  // without a branch, so that it becomes vectors
      const int32_t size = (numbers[channel] & 0x7fff) >> low, level = levels[channel];
      const int32_t counts = (size != 0) & (level != 0);
      above += (size - level) & -counts, found += counts;
    }
    const int32_t half = found * kStep / 2, whole = found * kStep;
    const int32_t level = !found ? 0 : above >= 0 ? (above + half) / whole : -((half - above) / whole);
    tokens[token] = (int8_t)(level > kMostToken ? kMostToken : level < -kMostToken ? -kMostToken : level);
  }
}

// Give the codes of a row of numbers. `turns` has the sign bit for channels whose signs are turned, `zero` is the code of
// a number on the level of its channel.
void find_codes(int low, int64_t channels, int32_t zero, const uint16_t* __restrict row, const uint16_t* __restrict levels,
                const uint8_t* __restrict turns, uint8_t* __restrict codes) {
  for (int64_t channel = 0; channel < channels; channel++) {
    const int32_t level = levels[channel], size = (row[channel] & 0x7fff) >> low;
    const int32_t code = size - level + (level ? zero : kZero);
    const int32_t sign = (row[channel] >> 8 & 128) ^ turns[channel];
    codes[channel] = (uint8_t)(code < 1 || code > 127 ? 0 : code | sign);
  }
}

// Find levels, groups and codes, and count the codes.
bool plan_tensor(int low, const Layout& l, const uint8_t* payload, int64_t layers, int64_t layer_bytes, Plan& plan,
                 uint32_t* counts, Memory memory) {
  const int64_t all = layers * l.channels;
  const bool is_split = l.t.kind != 2;  // V spreads alike in all channels, and its signs come at random
  float thirds[2], *spread = memory.take<float>(all);
  int32_t* sums = memory.take<int32_t>(l.channels * 4);
  uint16_t* room = memory.take<uint16_t>(l.channels + kLanes);
  int32_t* firsts = memory.take<int32_t>(l.channels);
  uint8_t *turns = memory.take<uint8_t>(l.channels), *nothing = memory.take<uint8_t>(l.channels);
  if (!spread || !sums || !room || !firsts || !turns || !nothing) return false;
  memset(nothing, 0, l.channels);
  int32_t *squares = sums + l.channels, *negative = squares + l.channels, *zeros = negative + l.channels;
  for (int64_t layer = 0; layer < layers; layer++) {
    memset(sums, 0, l.channels * 4 * sizeof(int32_t));
    for (int64_t token = 0; token < l.t.tokens; token++) {
      const uint16_t* row = row_of(l, payload + layer * layer_bytes, token, room);
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
    find_tokens(low, l, payload + layer * layer_bytes, plan.levels + layer * l.channels, room, plan.tokens + layer * l.t.tokens);
  }
  find_thirds(spread, all, thirds);
  for (int64_t at = 0; at < all; at++) {
    int third = 0;
    while (is_split && third < 2 && spread[at] > thirds[third]) third++;
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
      const uint16_t* row = row_of(l, payload + layer * layer_bytes, token, room);
      const int32_t zero = kZero - plan.tokens[layer * l.t.tokens + token] * kStep;
      counts[kTokenTable * 256 + (uint8_t)plan.tokens[layer * l.t.tokens + token]]++;
      uint8_t* codes = plan.codes + (layer * l.t.tokens + token) * l.channels;
      const uint8_t* before = token && is_split ? codes - l.channels : nothing;
      find_codes(low, l.channels, zero, row, levels, turns, codes);
      for (int64_t channel = 0; channel < l.channels; channel++) {
        counts[firsts[channel] + (before[channel] >> 7) * 256 + codes[channel]]++;
      }
    }
  }
  return true;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
struct Last {  // for each set of eight lanes, its lanes in order, at the end of a row
  uint8_t of[256][8] = {};
  constexpr Last() {
    for (int set = 0; set < 256; set++) {
      int at = 8;
      for (int lane = 7; lane >= 0; lane--) {
        if (set >> lane & 1) of[set][--at] = (uint8_t)lane;
      }
    }
  }
};
constexpr Last kLast;
#endif

struct Coder {  // writes words from the end of its room towards the front
  Words states;
  uint16_t* at;  // there is room for a word of each code
  const uint32_t* shares;

  // Put a code in each of `count` lanes, the last one first, with its table: the one at `firsts`, or the next, if the
  // code `before` has a minus sign. What is behind the codes may be read.
  __attribute__((always_inline)) inline void put(int count, const uint32_t* firsts, const uint8_t* before, const uint8_t* codes) {
#if defined(__AVX512F__)
    const __mmask16 lanes = (__mmask16)((1u << count) - 1);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    const __m512i sign = _mm512_and_si512(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)before)), _mm512_set1_epi32(128));
    const __m512i table = _mm512_add_epi32(_mm512_loadu_si512(firsts), _mm512_slli_epi32(sign, 1));
    const __m512i by = _mm512_mask_i32gather_epi32(_mm512_set1_epi32(1), lanes, _mm512_add_epi32(table, code), shares, 4);
    const __m512i share = _mm512_and_si512(by, _mm512_set1_epi32(0xffff));
    __m512i state = (__m512i)states;
    const __mmask16 full = _mm512_mask_cmpge_epu32_mask(lanes, _mm512_srli_epi32(state, 32 - kScale), share);
    const int words = __builtin_popcount(full);
    at -= words;
    _mm256_mask_storeu_epi16(at, (__mmask16)((1u << words) - 1), _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, state)));
    state = _mm512_mask_srli_epi32(state, full, state, 16);
    // A quotient is below 2^20, so that floats have it to within one.
    __m512i whole = _mm512_cvttps_epi32(_mm512_div_ps(_mm512_cvtepu32_ps(state), _mm512_cvtepi32_ps(share)));
    __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(whole, share));
    const __mmask16 is_less = _mm512_cmplt_epi32_mask(rest, _mm512_setzero_si512());
    whole = _mm512_mask_sub_epi32(whole, is_less, whole, _mm512_set1_epi32(1));
    rest = _mm512_mask_add_epi32(rest, is_less, rest, share);
    const __mmask16 is_more = _mm512_cmpge_epi32_mask(rest, share);
    whole = _mm512_mask_add_epi32(whole, is_more, whole, _mm512_set1_epi32(1));
    rest = _mm512_mask_sub_epi32(rest, is_more, rest, share);
    rest = _mm512_add_epi32(rest, _mm512_srli_epi32(by, 16));
    states = (Words)_mm512_mask_add_epi32((__m512i)states, lanes, _mm512_slli_epi32(whole, kScale), rest);
#else
#if defined(__AVX2__)
    if (count == kLanes) return put_eight(8, firsts, before, codes), put_eight(0, firsts, before, codes);
#endif
    for (int lane = count - 1; lane >= 0; lane--) {
      const uint32_t by = shares[firsts[lane] + (before[lane] & 128) * 2 + codes[lane]], share = by & 0xffff;
      uint32_t state = states[lane];
      const uint32_t is_full = state >> (32 - kScale) >= share;  // without a branch, which could not be foretold
      at[-1] = (uint16_t)state;
      at -= is_full, state >>= is_full * 16;
      states[lane] = state + (by >> 16) + state / share * (kSlots - share);
    }
#endif
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  // Put the codes of the eight lanes from `lane` on, as `put` does.
  __attribute__((always_inline)) inline void put_eight(int lane, const uint32_t* firsts, const uint8_t* before, const uint8_t* codes) {
    const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(codes + lane)));
    const __m256i sign = _mm256_and_si256(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(before + lane))), _mm256_set1_epi32(128));
    const __m256i table = _mm256_add_epi32(_mm256_loadu_si256((const __m256i*)(firsts + lane)), _mm256_slli_epi32(sign, 1));
    const __m256i by = _mm256_i32gather_epi32((const int*)shares, _mm256_add_epi32(table, code), 4);
    const __m256i lowest = _mm256_set1_epi32(0xffff), share = _mm256_and_si256(by, lowest);
    __m256i state;
    memcpy(&state, (const uint8_t*)&states + lane * 4, 32);
    const __m256i is_short = _mm256_cmpgt_epi32(share, _mm256_srli_epi32(state, 32 - kScale));
    const int full = ~_mm256_movemask_ps((__m256)is_short) & 255;
    const __m256i last = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kLast.of[full]));
    const __m256i words = _mm256_and_si256(_mm256_permutevar8x32_epi32(state, last), lowest);
    // The words that count are the last ones; the next ones are written over the others.
    _mm_storeu_si128((__m128i*)(at - 8), _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    at -= __builtin_popcount(full);
    state = _mm256_srlv_epi32(state, _mm256_andnot_si256(is_short, _mm256_set1_epi32(16)));
    // A quotient is below 2^21, so that floats have it to within one.
    const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(state, 16)), low = _mm256_cvtepi32_ps(_mm256_and_si256(state, lowest));
    const __m256 number = _mm256_fmadd_ps(high, _mm256_set1_ps(65536), low);
    __m256i whole = _mm256_cvttps_epi32(_mm256_div_ps(number, _mm256_cvtepi32_ps(share)));
    __m256i rest = _mm256_sub_epi32(state, _mm256_mullo_epi32(whole, share));
    const __m256i is_less = _mm256_srai_epi32(rest, 31);
    whole = _mm256_add_epi32(whole, is_less), rest = _mm256_add_epi32(rest, _mm256_and_si256(is_less, share));
    const __m256i is_within = _mm256_cmpgt_epi32(share, rest);
    whole = _mm256_add_epi32(whole, _mm256_andnot_si256(is_within, _mm256_set1_epi32(1)));
    rest = _mm256_sub_epi32(rest, _mm256_andnot_si256(is_within, share));
    rest = _mm256_add_epi32(rest, _mm256_srli_epi32(by, 16));
    state = _mm256_add_epi32(_mm256_slli_epi32(whole, kScale), rest);
    memcpy((uint8_t*)&states + lane * 4, &state, 32);
  }
#endif

  // Put a row of `count` codes, all with one table.
  void put_all(int64_t count, int table, const uint8_t* codes) {
    static const uint8_t kNothing[kLanes] = {0};
    uint32_t firsts[kLanes];
    for (int lane = 0; lane < kLanes; lane++) firsts[lane] = (uint32_t)table * 256;
    for (int64_t first = (count - 1) / kLanes * kLanes; first >= 0; first -= kLanes) {
      put(count - first < kLanes ? (int)(count - first) : kLanes, firsts, kNothing, codes + first);
    }
  }
};

// Put the codes of a tensor of one layer, the last one first. `row` has room for codes of a row or of the tokens.
void put_codes(const Layout& l, const Plan& plan, int64_t number, Coder& whole, uint8_t* row) {
  const uint16_t* levels = plan.levels + number * l.channels;
  const uint8_t* codes = plan.codes + number * l.numbers;
  const uint32_t* firsts = plan.firsts + number * l.channels;
  const int tail = (int)(l.channels - (l.chunks - 1) * kLanes);
  Coder coder = whole;
  coder.shares = plan.shares;
  memset(row, 0, l.channels + kLanes);
  for (int64_t token = l.t.tokens - 1; token >= 0; token--) {
    const uint8_t *of_row = codes + token * l.channels, *before = token ? of_row - l.channels : row;
    for (int64_t first = (l.chunks - 1) * kLanes; first >= 0; first -= kLanes) {
      coder.put(first / kLanes == l.chunks - 1 ? tail : kLanes, firsts + first, before + first, of_row + first);
    }
  }
  coder.put_all(l.t.tokens, kTokenTable, (const uint8_t*)plan.tokens + number * l.t.tokens);
  for (int64_t channel = 0; channel < l.channels; channel++) row[channel] = level_code(levels[channel], plan.bases[number]);
  coder.put_all(l.channels, kLevelTable, row);
  coder.put_all(l.channels, kGroupTable, plan.groups + number * l.channels);
  whole = coder;
}

// Write the bits below the codes of a tensor but of the last `tail` chunks, and its exceptions. Returns the end.
uint8_t* put_rest(int low, const Layout& l, const uint8_t* layer, const uint8_t* codes, int64_t tail, bool exceptions,
                  uint8_t* out, uint16_t* room) {
  const int64_t last = l.t.tokens * l.chunks - tail;
  uint8_t *plane = out, *list = out + last * 2 * low;
  memset(room, 0, l.chunks * kLanes * 2);
  for (int64_t token = 0; token < l.t.tokens; token++) {
    const uint16_t* row = row_of(l, layer, token, room);
    if (l.channels % kLanes && row != room) memcpy(room, row, l.channels * 2), row = room;
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

void begin_states(int low, const Layout& last, const uint8_t* layer, uint16_t* row, Words& states) {
  const int64_t tail = tail_chunks(low, last), all = last.t.tokens * last.chunks;
  uint16_t words[kLanes] = {0};
  for (int64_t at = all - tail; at < all; at++) {
    memset(row, 0, last.chunks * kLanes * 2);
    const uint16_t* numbers = row_of(last, layer, at / last.chunks, row);
    if (numbers != row) memcpy(row, numbers, last.channels * 2);
    put_low(low, row + at % last.chunks * kLanes, (uint8_t*)words + (at - all + tail) * 2 * low);
  }
  for (int lane = 0; lane < kLanes; lane++) states[lane] = kLeast | words[lane];
}

// Encode one layer. Returns its length, 0 when it does not fit.
int64_t encode_layer(int low, const Tensor* tensors, int64_t count, const uint8_t* layer, const Plan* plans, int64_t number,
                     uint8_t* out, int64_t room, uint16_t* words, int64_t most_words, uint8_t* row) {
  Coder coder;
  coder.at = words + most_words;
  bool any[16] = {false};  // of its tensors, of which there are no more: whether they have exceptions
  const Layout last(tensors[count - 1]);
  begin_states(low, last, layer, words, coder.states);
  int64_t nbytes = 4 + 6 * count + 64 - tail_chunks(low, last) * 2 * low;
  for (int64_t at = count - 1; at >= 0; at--) {
    const Layout l(tensors[at]);
    const uint8_t* codes = plans[at].codes + number * l.numbers;
    put_codes(l, plans[at], number, coder, row);
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
  memcpy(out, &words_bytes, 4), memcpy(to, &coder.states, 64), memcpy(to + 64, coder.at, words_bytes);
  to += 64 + words_bytes;
  for (int64_t at = 0; at < count; at++) {  // the words are no longer needed: there is room for a row
    const Layout l(tensors[at]);
    const int64_t tail = at == count - 1 ? tail_chunks(low, last) : 0;
    to = put_rest(low, l, layer, plans[at].codes + number * l.numbers, tail, any[at], to, words);
  }
  return nbytes;
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
    most += l.numbers + 2 * l.channels + l.t.tokens + 2 * kLanes;
  }
  Memory memory = {work, work_bytes};
  Plan* plans = memory.take<Plan>(count);
  uint32_t* counts = memory.take<uint32_t>(kTables * 256);
  uint16_t* words = memory.take<uint16_t>(most);
  uint8_t* row = memory.take<uint8_t>(most);
  bool is_sound = plans && counts && words && row;
  BitWriter bits = {out, out + room};
  for (int64_t at = 0; at < count && is_sound; at++) {
    const Layout l(tensors[at]);
    Plan& plan = plans[at];
    plan.codes = memory.take<uint8_t>(layers * l.numbers + kLanes), plan.levels = memory.take<uint16_t>(layers * l.channels);
    plan.groups = memory.take<uint8_t>(layers * l.channels + kLanes), plan.bases = memory.take<uint16_t>(layers);
    plan.shares = memory.take<uint32_t>(kTables * 256), plan.firsts = memory.take<uint32_t>(layers * l.channels + kLanes);
    plan.tokens = memory.take<int8_t>(layers * l.t.tokens + kLanes);
    memset(counts, 0, kTables * 256 * 4);
    is_sound = plan.codes && plan.levels && plan.groups && plan.bases && plan.shares && plan.firsts && plan.tokens &&
               plan_tensor((int)low, l, payload, layers, layer_bytes, plan, counts, memory);
    uint8_t levels[256];
    for (int table = 0; table < kTables && is_sound; table++) {
      const bool is_again = table % 2 && table < kShared && l.t.kind == 2;
      if (!is_again) levels_of(counts + table * 256, levels);
      Frequencies found = {};
      frequencies_of(levels, found);
      for (int code = 0; code < 256; code++) plan.shares[table * 256 + code] = found.of[code] | (uint32_t)found.start[code] << 16;
      bits.put(is_again, 1);
      if (!is_again) put_levels(bits, levels);
    }
  }
  for (int64_t at = 0; at < count && is_sound; at++) {
    for (int64_t place = 0; place < layers * Layout(tensors[at]).channels; place++) {
      plans[at].firsts[place] = (uint32_t)table_of(plans[at].groups[place]) * 256;
    }
  }
  if (is_sound) bits.close();
  *tables_bytes = written = bits.to - out;
  for (int64_t layer = 0; layer < layers && is_sound && bits.fits && written >= 0; layer++) {
    const uint8_t* whole = payload + layer * layer_bytes;
    const int64_t left = room - written < layer_bytes ? room - written : layer_bytes;
    lengths[layer] = encode_layer((int)low, tensors, count, whole, plans, layer, out + written, left, words, most, row);
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
