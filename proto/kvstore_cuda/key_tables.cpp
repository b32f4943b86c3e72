// Tables that find keys, filled and searched as key_table.py does it with NumPy, with equal results. Keys come in no
// order: what is written is divided by its place first, so that it stays in the caches.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int ENTRY_BITS = 31;
constexpr uint32_t ENTRY_MASK = (1u << ENTRY_BITS) - 1;
constexpr uint64_t PART_BITS = 14;     // of the places in a part
constexpr uint64_t PARTS_MAX = 8192;   // more pages than that are not written to at once
constexpr uint32_t CROWD = 16;         // more keys of one home are sorted otherwise
constexpr uint64_t LOOKED_FOR = 32;    // keys whose memory is asked for before it is needed

inline uint64_t home_of(uint32_t word, uint32_t multiplier, uint64_t size) {
    return static_cast<uint64_t>(word * multiplier) * size >> 32;
}

template <typename Word>
struct Memory {
    explicit Memory(uint64_t words) : at(static_cast<Word*>(malloc(sizeof(Word) * words))) {}
    ~Memory() { free(at); }
    Word* const at;
};

}  // namespace

extern "C" {

// Fills a table of `room` empty places (-1): each entry goes behind the one before, in the order of their homes and
// then of themselves, or to its home if that is later. `keys` are of four words; `members` are the positions of `count`
// of them, or null for the first `count`. `repeats` gets 1 if two of the keys may be equal. Returns the number of places
// up to the last entry, behind which one is empty; -1 if there is no room.
int64_t kv_fill_table(const uint32_t* keys, const int64_t* members, uint64_t count, uint32_t multiplier, uint64_t size,
                      uint32_t bits, int32_t* table, uint64_t room, int32_t* repeats) {
    uint64_t part_bits = PART_BITS;
    while (size >> part_bits >= PARTS_MAX) ++part_bits;
    const uint64_t parts = (size >> part_bits) + 1, places = 1ull << part_bits;
    const Memory<uint64_t> divided(count), ends(parts + 1);
    const Memory<uint32_t> firsts(places + 1);
    if (!divided.at || !ends.at || !firsts.at) return -1;
    memset(ends.at, 0, 8 * (parts + 1));
    for (uint64_t i = 0; i < count; ++i) {
        ++ends.at[(home_of(keys[4 * (members ? members[i] : i)], multiplier, size) >> part_bits) + 1];
    }
    uint64_t most = 0;
    for (uint64_t part = 0; part < parts; ++part) {
        most = std::max(most, ends.at[part + 1]);
        ends.at[part + 1] += ends.at[part];
    }
    for (uint64_t i = 0; i < count; ++i) {
        const uint64_t position = members ? members[i] : i;
        const uint32_t* key = keys + 4 * position;
        const uint64_t home = home_of(key[0], multiplier, size);
        divided.at[ends.at[home >> part_bits]++] = home << ENTRY_BITS | ((key[1] << bits) & ENTRY_MASK) | position;
    }
    const Memory<uint64_t> ordered(most + 1);
    if (!ordered.at) return -1;
    const uint64_t mask = (1ull << bits) - 1;
    uint64_t next = 0, begin = 0;
    *repeats = 0;
    for (uint64_t part = 0; part < parts; ++part) {
        const uint64_t end = ends.at[part], here = end - begin;
        const auto home_in = [=](uint64_t word) { return (word >> ENTRY_BITS) & (places - 1); };
        memset(firsts.at, 0, 4 * (places + 1));
        for (uint64_t at = begin; at < end; ++at) ++firsts.at[home_in(divided.at[at]) + 1];
        uint32_t crowd = 0;
        for (uint64_t i = 1; i <= places; ++i) {
            crowd = std::max(crowd, firsts.at[i]);
            firsts.at[i] += firsts.at[i - 1];
        }
        uint64_t* const sorted = ordered.at;
        for (uint64_t at = begin; at < end; ++at) sorted[firsts.at[home_in(divided.at[at])]++] = divided.at[at];
        if (crowd > CROWD) {
            std::sort(sorted, sorted + here);
        } else {
            for (uint64_t at = 1; at < here; ++at) {
                const uint64_t word = sorted[at];
                uint64_t to = at;
                for (; to && sorted[to - 1] > word; --to) sorted[to] = sorted[to - 1];
                sorted[to] = word;
            }
        }
        bool was_alike = false;
        for (uint64_t at = 0; at < here; ++at) {
            const uint64_t word = sorted[at];
            next = std::max(next, word >> ENTRY_BITS);
            if (next + 1 >= room) return -1;  // an empty place ends each search
            table[next++] = static_cast<int32_t>(word & ENTRY_MASK);
            if (!at || (word ^ sorted[at - 1]) > mask) {
                was_alike = false;
                continue;
            }
            const uint32_t *one = keys + 4 * (word & mask), *two = keys + 4 * (sorted[at - 1] & mask);
            if (was_alike || !memcmp(one, two, 16)) *repeats = 1;
            was_alike = true;
        }
        begin = end;
    }
    return static_cast<int64_t>(next);
}

// Finds the position in `keys` of each of `count` keys in `wanted`, or -1, by a table that `kv_fill_table` filled.
void kv_find_keys(const int32_t* table, uint64_t size, uint32_t bits, uint32_t multiplier, const uint64_t* keys,
                  const uint64_t* wanted, uint64_t count, int32_t* found) {
    const int32_t last = static_cast<int32_t>((1ull << bits) - 1);
    const auto home = [=](uint64_t i) { return home_of(static_cast<uint32_t>(wanted[2 * i]), multiplier, size); };
    const auto tag = [=](uint64_t i) {
        return static_cast<int32_t>((static_cast<uint32_t>(wanted[2 * i] >> 32) << bits) & ENTRY_MASK);
    };
    for (uint64_t i = 0; i < count + 2 * LOOKED_FOR; ++i) {
        if (i < count) __builtin_prefetch(table + home(i));
        if (i >= LOOKED_FOR && i - LOOKED_FOR < count) {
            const int32_t there = table[home(i - LOOKED_FOR)] ^ tag(i - LOOKED_FOR);
            if (there >= 0 && there <= last) __builtin_prefetch(keys + 2 * there);
        }
        if (i < 2 * LOOKED_FOR) continue;
        const uint64_t at = i - 2 * LOOKED_FOR;
        found[at] = -1;
        for (const int32_t *place = table + home(at); *place >= 0; ++place) {
            const int64_t there = *place ^ tag(at);
            if (there > last || keys[2 * there] != wanted[2 * at] || keys[2 * there + 1] != wanted[2 * at + 1]) continue;
            found[at] = static_cast<int32_t>(there);
            break;
        }
    }
}

}  // extern "C"
