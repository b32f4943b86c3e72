// Copies of payloads that hash as they go: each byte is read once, into a register, and stored and hashed from there.
// So a hash is of what was stored, also where another process writes to the source meanwhile. The hash is xxh3_64 with
// the default secret and no seed, of more than 240 bytes (xxHash by Yann Collet, BSD 2-Clause).
// Records of the NVMe tier are copied into columns, and judged, as they are hashed, each with a seed of its own.
//
// Large payloads are stored past the caches: a cached store first reads the line that it will replace, so that a copy
// moves three bytes for each one. Stores past the caches end before the header that vouches for them is written.

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr uint64_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87U, P64_2 = 0xC2B2AE3D27D4EB4FU, P64_3 = 0x165667B19E3779F9U;
constexpr uint64_t P64_4 = 0x85EBCA77C2B2AE63U, P64_5 = 0x27D4EB2F165667C5U, MIX = 0x165667919E3779F9U;
constexpr size_t STRIPE = 64, STRIPES_A_BLOCK = 16, SECRET = 192, HEADER = 4096;
constexpr size_t RECORD = 256, RECORD_WORDS = 32, DIGESTED = 248;  // kvstore_tiers/nvme/layout.py
// Words of a record, docs/format.md, and what is in them.
constexpr size_t GENERATION = 1, SEQUENCE = 2, KEY = 3, PARENT = 5, ORIGIN = 9, ORIGIN_BYTES = 48, GROUP_AND_DEPTH = 15;
constexpr size_t ERROR = 16, PAYLOAD = 17, STORED = 20, KEPT = 22, DATA_KEY = 23, LAST = 31;
constexpr uint64_t GROUP_MASK = 0xFFFF, CODEC_MASK = 0xFFFF0000, LENGTH_MASK = (1ull << 48) - 1;
constexpr uint32_t MAGIC = 0x3152564B, FREE = 0, LIVE = 1, LAST_STATE = 2;
constexpr size_t SUMS = 8;                     // words of a hash under way; one more counts the stripes
constexpr size_t A_LINE = 8;                   // records whose words fill one line of the cache in each column
constexpr size_t AHEAD = 1024;                 // bytes that are fetched before they are needed
constexpr size_t PAST_CACHES = 128 * 1024;     // payloads from this size on
constexpr size_t PAST_CACHES_RUN = 2048;       // runs of a larger copy from this size on
constexpr size_t LOT = 512 * 1024;             // bytes that one of several threads copies at a time
constexpr size_t VECTORS_MIN = 512;            // what is shorter, memcpy copies by vectors
constexpr size_t CHECKSUM_AT = 128, HEADER_CHECKSUM_AT = 152, STORED_CHECKSUM_AT = 168;  // kvstore_proto/arena.py

alignas(64) const uint8_t SECRET_BYTES[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct LiveColumns {  // kvstore_tiers/nvme/verdicts.py
    uint64_t *slots, *key, *parent;
    uint32_t *origin, *depth;
    uint64_t *sequence, *payload_bytes, *generation, *kept;
    uint32_t* error;
};

struct Sums {
    __m256i low, high;
};

inline uint64_t word(const void* at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

inline uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline __m256i loaded(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

inline __m256i added(__m256i sum, __m256i data, const uint8_t* secret) {
    const __m256i key = _mm256_xor_si256(data, loaded(secret));
    const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    return _mm256_add_epi64(_mm256_add_epi64(sum, _mm256_shuffle_epi32(data, 0x4E)), product);
}

inline __m256i scrambled(__m256i sum, const uint8_t* secret) {
    const __m256i key = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), loaded(secret));
    const __m256i prime = _mm256_set1_epi32(static_cast<int>(P32_1));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(key, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(key, prime), _mm256_slli_epi64(high, 32));
}

inline Sums begun() {
    alignas(32) const uint64_t first[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(first)),
            _mm256_load_si256(reinterpret_cast<const __m256i*>(first + 4))};
}

inline uint64_t ended(Sums sums, const uint8_t* last_stripe, size_t nbytes, const uint8_t* secret = SECRET_BYTES) {
    const uint8_t* last_secret = secret + SECRET - STRIPE - 7;
    alignas(32) uint64_t of[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(of), added(sums.low, loaded(last_stripe), last_secret));
    _mm256_store_si256(
        reinterpret_cast<__m256i*>(of + 4), added(sums.high, loaded(last_stripe + 32), last_secret + 32));
    uint64_t hash = nbytes * P64_1;
    for (size_t pair = 0; pair < 4; ++pair) {
        const uint8_t* mixed = secret + 11 + 16 * pair;
        hash += folded(of[2 * pair] ^ word(mixed), of[2 * pair + 1] ^ word(mixed + 8));
    }
    hash = (hash ^ hash >> 37) * MIX;
    return hash ^ hash >> 32;
}

enum class Store { NONE, CACHED, PAST };

// `first` is the number of stripes that were hashed into `sums` before.
template <Store STORE, bool HASH>
Sums stripes(uint8_t* target, const uint8_t* source, size_t count, Sums sums = begun(), size_t first = 0) {
    for (size_t at = first; at < first + count; ++at, source += STRIPE, target += STRIPE) {
        if (STORE == Store::PAST) _mm_prefetch(reinterpret_cast<const char*>(source) + AHEAD, _MM_HINT_NTA);
        __m256i low = loaded(source), high = loaded(source + 32);
        asm volatile("" : "+x"(low), "+x"(high));  // in registers from here on: the source is not read again
        if (STORE == Store::PAST) {
            _mm256_stream_si256(reinterpret_cast<__m256i*>(target), low);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32), high);
        } else if (STORE == Store::CACHED) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), low);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 32), high);
        }
        if (!HASH) continue;
        const uint8_t* secret = SECRET_BYTES + 8 * (at % STRIPES_A_BLOCK);
        sums.low = added(sums.low, low, secret);
        sums.high = added(sums.high, high, secret + 32);
        if (at % STRIPES_A_BLOCK == STRIPES_A_BLOCK - 1) {
            sums.low = scrambled(sums.low, SECRET_BYTES + SECRET - STRIPE);
            sums.high = scrambled(sums.high, SECRET_BYTES + SECRET - STRIPE + 32);
        }
    }
    return sums;
}

uint64_t hashed(const uint8_t* source, size_t nbytes) {
    const Sums sums = stripes<Store::NONE, true>(nullptr, source, (nbytes - 1) / STRIPE);
    return ended(sums, source + nbytes - STRIPE, nbytes);
}

uint64_t copied_and_hashed(uint8_t* target, const uint8_t* source, size_t nbytes) {
    const size_t whole = (nbytes - 1) / STRIPE;
    const bool is_past = nbytes >= PAST_CACHES && reinterpret_cast<uintptr_t>(target) % 32 == 0;
    const Sums sums = is_past ? stripes<Store::PAST, true>(target, source, whole)
                              : stripes<Store::CACHED, true>(target, source, whole);
    memcpy(target + whole * STRIPE, source + whole * STRIPE, nbytes - whole * STRIPE);
    if (is_past) _mm_sfence();
    return ended(sums, target + nbytes - STRIPE, nbytes);
}

// Copies by vectors, where memcpy may take `rep movsb`, which is slow on some processors (Zen 3) if the target begins
// some bytes behind the source's place in a page. A copy past the caches needs `_mm_sfence` behind it.
void copied(uint8_t* target, const uint8_t* source, size_t nbytes, bool is_past) {
    if (nbytes < VECTORS_MIN) {
        memcpy(target, source, nbytes);
        return;
    }
    const size_t to_line = -reinterpret_cast<uintptr_t>(target) % STRIPE;
    const size_t whole = (nbytes - to_line) / STRIPE, rest = to_line + whole * STRIPE;
    memcpy(target, source, to_line);
    if (is_past) stripes<Store::PAST, false>(target + to_line, source + to_line, whole);
    else stripes<Store::CACHED, false>(target + to_line, source + to_line, whole);
    memcpy(target + rest, source + rest, nbytes - rest);
}

// The seed is added to the even words of the secret, and taken from the odd ones.
inline uint64_t hash_of_record(const uint8_t* record, uint64_t seed) {
    alignas(32) uint8_t secret[SECRET];
    const long long plus = static_cast<long long>(seed), minus = static_cast<long long>(0 - seed);
    const __m256i by = _mm256_set_epi64x(minus, plus, minus, plus);
    for (size_t at = 0; at < SECRET; at += 32)
        _mm256_store_si256(reinterpret_cast<__m256i*>(secret + at), _mm256_add_epi64(loaded(SECRET_BYTES + at), by));
    Sums sums = begun();
    for (size_t at = 0; at < DIGESTED / STRIPE; ++at) {
        sums.low = added(sums.low, loaded(record + STRIPE * at), secret + 8 * at);
        sums.high = added(sums.high, loaded(record + STRIPE * at + 32), secret + 8 * at + 32);
    }
    return ended(sums, record + DIGESTED - STRIPE, DIGESTED, secret);
}

// Whether two records name the same tenant, fingerprint, layer group and key of encryption.
inline bool is_of_one_origin(const uint64_t* one, const uint64_t* other) {
    return !((one[GROUP_AND_DEPTH] ^ other[GROUP_AND_DEPTH]) & GROUP_MASK) && one[DATA_KEY] == other[DATA_KEY] &&
           !memcmp(one + ORIGIN, other + ORIGIN, ORIGIN_BYTES);
}

inline bool is_used(const uint64_t* record) {
    for (size_t i = 0; i < RECORD_WORDS; ++i)
        if (record[i]) return true;
    return false;
}

// Copies four words of each of four records, one behind the other, into four columns.
inline void turned(uint64_t* columns, size_t stride, const uint8_t* records) {
    const __m256i a = loaded(records), b = loaded(records + RECORD);
    const __m256i c = loaded(records + 2 * RECORD), d = loaded(records + 3 * RECORD);
    const __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
    const __m256i more_even = _mm256_unpacklo_epi64(c, d), more_odd = _mm256_unpackhi_epi64(c, d);
    const auto put = [=](size_t column, __m256i words) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(columns + column * stride), words);
    };
    put(0, _mm256_permute2x128_si256(even, more_even, 0x20));
    put(1, _mm256_permute2x128_si256(odd, more_odd, 0x20));
    put(2, _mm256_permute2x128_si256(even, more_even, 0x31));
    put(3, _mm256_permute2x128_si256(odd, more_odd, 0x31));
}

}  // namespace

extern "C" {

// Copies `nbytes` (over 240) from `source` to `target`, and returns the hash of what is there.
uint64_t kv_copy_and_hash(uint8_t* target, const uint8_t* source, size_t nbytes) {
    return copied_and_hashed(target, source, nbytes);
}

// Begins a hash of bytes that come in pieces.
void kv_hash_begin(uint64_t* hash) {
    const Sums sums = begun();
    memcpy(hash, &sums, sizeof sums);
    hash[SUMS] = 0;
}

// Copies the next piece of such bytes, whole stripes, past the caches where `target` begins a vector. The last piece of
// them, of more bytes in all than one stripe, ends the hash: it is returned then.
uint64_t kv_hash_more(uint64_t* hash, uint8_t* target, const uint8_t* source, uint64_t nbytes, uint64_t is_last) {
    Sums sums;
    memcpy(&sums, hash, sizeof sums);
    const size_t count = nbytes / STRIPE - is_last;
    const bool is_past = reinterpret_cast<uintptr_t>(target) % 32 == 0;
    sums = is_past ? stripes<Store::PAST, true>(target, source, count, sums, hash[SUMS])
                   : stripes<Store::CACHED, true>(target, source, count, sums, hash[SUMS]);
    hash[SUMS] += count;
    memcpy(hash, &sums, sizeof sums);
    if (!is_last) return 0;
    memcpy(target + count * STRIPE, source + count * STRIPE, STRIPE);
    _mm_sfence();
    return ended(sums, source + count * STRIPE, (hash[SUMS] + 1) * STRIPE);
}

// Copies `nbytes`, past the caches where they are many.
void kv_copy(uint8_t* target, const uint8_t* source, size_t nbytes) {
    copied(target, source, nbytes, nbytes >= PAST_CACHES);
    _mm_sfence();
}

// Copies `count` runs of `nbytes` each, past the caches where all of them together are many bytes, beside other threads
// with equal arguments: `next` counts the lots of bytes that were taken.
void kv_copy_runs(
    uint64_t* next, uint64_t count, uint8_t* const* targets, const uint8_t* const* sources, uint64_t nbytes) {
    const uint64_t total = count * nbytes;
    const bool is_past = nbytes >= PAST_CACHES_RUN && total >= PAST_CACHES;
    for (uint64_t at; (at = LOT * __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < total;) {
        const uint64_t end = at + LOT < total ? at + LOT : total;
        for (uint64_t run = at / nbytes, from = at % nbytes, length; at < end; at += length, ++run, from = 0) {
            length = nbytes - from < end - at ? nbytes - from : end - at;
            copied(targets[run] + from, sources[run] + from, length, is_past);
        }
    }
    _mm_sfence();
}

// Copies `count` records into columns, whose words begin `stride` words apart: word i of all records into column i.
// `checksums` gets the hash of each record's words but the last, under its own seed.
void kv_load_records(
    const uint8_t* records, uint64_t count, const uint64_t* seeds, uint64_t* columns, uint64_t stride,
    uint64_t* checksums) {
    uint64_t at = 0;
    for (; at + A_LINE <= count; at += A_LINE) {
        const uint8_t* source = records + RECORD * at;
        for (size_t i = 0; i < A_LINE; ++i) checksums[at + i] = hash_of_record(source + RECORD * i, seeds[at + i]);
        for (size_t word = 0; word < RECORD_WORDS; word += 4) {
            turned(columns + word * stride + at, stride, source + 8 * word);
            turned(columns + word * stride + at + 4, stride, source + 8 * word + 4 * RECORD);
        }
    }
    for (; at < count; ++at) {
        checksums[at] = hash_of_record(records + RECORD * at, seeds[at]);
        for (size_t i = 0; i < RECORD_WORDS; ++i) columns[i * stride + at] = word(records + RECORD * at + 8 * i);
    }
}

// Judges `count` records, as verdicts.py does it with NumPy. Their seeds count up from `seed`, their slots from `first`;
// slots from position `within` on are behind the file's end. `states`, `generations` and `stored` get a value for each
// record, the columns `live` (of verdicts.LiveBlocks) one for each stored block, `origin` there being a position in
// `origins`: the records, `origins_max` at most, that were the first of their origin. `bad` gets the positions of
// records that do not hold from its beginning on, and those of stored blocks behind the file's end from its own end
// backwards. `counts` gets the numbers of stored blocks, of either kind of bad record, of origins, and the last
// sequence. Returns 0, or -1 if there are more origins.
int32_t kv_judge_records(
    const uint64_t* records, uint64_t count, uint64_t seed, uint64_t first, uint64_t within, uint8_t* states,
    uint64_t* generations, uint64_t* stored, const LiveColumns* live, uint32_t* bad, uint32_t* origins,
    uint64_t origins_max, uint64_t* counts) {
    uint64_t blocks = 0, unsound = 0, truncated = 0, known = 0, last = 0;
    uint32_t origin = 0;
    for (uint64_t at = 0; at < count; ++at) {
        const uint64_t* record = records + RECORD_WORDS * at;
        const uint64_t head = record[0], said = head >> 48 & 0xFF, group_and_depth = record[GROUP_AND_DEPTH];
        generations[at] = record[GENERATION];
        stored[at] = (record[STORED] & LENGTH_MASK) | (group_and_depth & CODEC_MASK) << 32;
        states[at] = FREE;
        if (static_cast<uint32_t>(head) != MAGIC || said > LAST_STATE ||
            hash_of_record(reinterpret_cast<const uint8_t*>(record), seed + at) != record[LAST]) {
            if (is_used(record)) bad[unsound++] = static_cast<uint32_t>(at);
            continue;
        }
        if (record[SEQUENCE] > last) last = record[SEQUENCE];
        if (said == LIVE && at >= within) {
            bad[count - ++truncated] = static_cast<uint32_t>(at);
            continue;
        }
        states[at] = static_cast<uint8_t>(said);
        if (said != LIVE) continue;
        if (!known || !is_of_one_origin(record, records + RECORD_WORDS * origins[origin])) {
            for (origin = 0; origin < known; ++origin)
                if (is_of_one_origin(record, records + RECORD_WORDS * origins[origin])) break;
            if (origin == origins_max) return -1;
            if (origin == known) origins[known++] = static_cast<uint32_t>(at);
        }
        live->slots[blocks] = first + at;
        memcpy(live->key + 2 * blocks, record + KEY, 16);
        memcpy(live->parent + 2 * blocks, record + PARENT, 16);
        live->origin[blocks] = origin;
        live->depth[blocks] = static_cast<uint32_t>(group_and_depth >> 32);
        live->sequence[blocks] = record[SEQUENCE];
        live->payload_bytes[blocks] = record[PAYLOAD];
        live->generation[blocks] = record[GENERATION];
        live->kept[blocks] = record[KEPT];
        live->error[blocks] = static_cast<uint32_t>(record[ERROR] >> 32);
        ++blocks;
    }
    const uint64_t found[] = {blocks, unsound, truncated, known, last};
    memcpy(counts, found, sizeof found);
    return 0;
}

// Stores blocks until none is left, beside other threads with equal arguments: `next` counts the blocks that were
// taken. Block i is in the slot at `targets[i]`, its payload of `sizes[i]` bytes (over 240) at `sources[i]`, which is
// the slot's own place of it or apart. Header i at `headers + 4096 * i` is complete but for its checksums.
void kv_store_images(
    uint64_t* next, uint64_t count, uint8_t* const* targets, const uint8_t* const* sources, const uint64_t* sizes,
    uint8_t* headers) {
    for (uint64_t at; (at = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < count;) {
        uint8_t *payload = targets[at] + HEADER, *header = headers + HEADER * at;
        const uint64_t checksum = sources[at] == payload ? hashed(payload, sizes[at])
                                                         : copied_and_hashed(payload, sources[at], sizes[at]);
        memcpy(header + CHECKSUM_AT, &checksum, sizeof checksum);
        memcpy(header + STORED_CHECKSUM_AT, &checksum, sizeof checksum);
        const uint64_t of_header = hashed(header, HEADER);
        memcpy(header + HEADER_CHECKSUM_AT, &of_header, sizeof of_header);
        memcpy(targets[at], header, HEADER);
    }
}

}  // extern "C"
