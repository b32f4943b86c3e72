// Encodes blocks for context.py; `context_layout.h` says how.
#include "context_layout.h"

#include <cstdlib>

namespace {

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
