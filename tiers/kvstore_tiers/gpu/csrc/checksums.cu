// xxh3_64 (seed 0) of ranges of device memory, the same value as the library xxhash on a CPU.
//
// A thread block takes a range. Of more than 240 bytes the sum of each stretch of 1 KiB depends on the one before it by
// an addition alone, until it is scrambled: so all threads sum stretches side by side (`sum_stretch`), and eight, one for
// each accumulator, then add and scramble one stretch after another. Ranges start at a multiple of 16.
// Compiled with KV_THREADS, a multiple of 32.

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)  // a stand-in for a device brings its own
#define KV_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

typedef unsigned long long u64;

// checksums.py's structs, field by field.
struct Range {
    u64 address, nbytes, sum;
};
struct Checksums {
    Range* ranges;  // memory that the device can read and write
    u64 count;
};

namespace {

constexpr u64 kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr u64 kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9;
constexpr u64 kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;
constexpr u64 kPrimeMix_1 = 0x165667919E3779F9, kPrimeMix_2 = 0x9FB21C651E98DF25;

constexpr int kStripe = 64, kLanes = 8, kStripes = 16;  // stripes of a stretch
constexpr int kStretch = kStripe * kStripes;
constexpr int kScramble = 16;                    // the first of the secret's words that scramble
constexpr int kPairs = kLanes / 2;               // a thread sums two lanes: 16 bytes are one load
constexpr int kStretches = KV_THREADS / kPairs;  // of a round

// The 192 bytes of the algorithm's secret.
__constant__ const u64 kSecret[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
    0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5,
    0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

__device__ __forceinline__ u64 secret_at(int offset) {
    const int word = offset / 8, shift = offset % 8 * 8;
    return shift ? kSecret[word] >> shift | kSecret[word + 1] << (64 - shift) : kSecret[word];
}

// Little-endian, at any address.
__device__ __forceinline__ u64 bytes_at(const unsigned char* from, int count) {
    u64 value = 0;
    for (int i = 0; i < count; i++) value |= static_cast<u64>(from[i]) << (8 * i);
    return value;
}

__device__ __forceinline__ u64 rotated(u64 value, int by) { return value << by | value >> (64 - by); }

__device__ __forceinline__ u64 swapped(u64 value) {
    u64 other = 0;
    for (int i = 0; i < 8; i++) other |= (value >> (8 * i) & 0xff) << (56 - 8 * i);
    return other;
}

__device__ __forceinline__ u64 folded(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }

__device__ __forceinline__ u64 avalanche(u64 hash) {
    hash = (hash ^ hash >> 37) * kPrimeMix_1;
    return hash ^ hash >> 32;
}

__device__ __forceinline__ u64 avalanche64(u64 hash) {
    hash = (hash ^ hash >> 33) * kPrime64_2;
    hash = (hash ^ hash >> 29) * kPrime64_3;
    return hash ^ hash >> 32;
}

__device__ __forceinline__ u64 mix(const unsigned char* from, int secret) {
    return folded(bytes_at(from, 8) ^ secret_at(secret), bytes_at(from + 8, 8) ^ secret_at(secret + 8));
}

// Up to 240 bytes: one thread computes it.
__device__ u64 short_checksum(const unsigned char* from, int nbytes) {
    if (nbytes == 0) return avalanche64(secret_at(56) ^ secret_at(64));
    if (nbytes <= 3) {
        const u64 combined = static_cast<u64>(from[0]) << 16 | static_cast<u64>(from[nbytes >> 1]) << 24 |
                             from[nbytes - 1] | static_cast<u64>(nbytes) << 8;
        return avalanche64(combined ^ ((secret_at(0) & 0xffffffff) ^ (secret_at(4) & 0xffffffff)));
    }
    if (nbytes <= 8) {
        const u64 keyed = (bytes_at(from + nbytes - 4, 4) + (bytes_at(from, 4) << 32)) ^ (secret_at(8) ^ secret_at(16));
        u64 hash = (keyed ^ rotated(keyed, 49) ^ rotated(keyed, 24)) * kPrimeMix_2;
        hash = (hash ^ ((hash >> 35) + nbytes)) * kPrimeMix_2;
        return hash ^ hash >> 28;
    }
    if (nbytes <= 16) {
        const u64 low = bytes_at(from, 8) ^ (secret_at(24) ^ secret_at(32));
        const u64 high = bytes_at(from + nbytes - 8, 8) ^ (secret_at(40) ^ secret_at(48));
        return avalanche(nbytes + swapped(low) + high + folded(low, high));
    }
    u64 hash = nbytes * kPrime64_1;
    if (nbytes <= 128) {
        for (int i = (nbytes - 1) / 32; i >= 0; i--)
            hash += mix(from + 16 * i, 32 * i) + mix(from + nbytes - 16 * (i + 1), 32 * i + 16);
        return avalanche(hash);
    }
    for (int i = 0; i < 8; i++) hash += mix(from + 16 * i, 16 * i);
    hash = avalanche(hash);
    for (int i = 8; i < nbytes / 16; i++) hash += mix(from + 16 * i, 16 * (i - 8) + 3);
    return avalanche(hash + mix(from + nbytes - 16, 136 - 17));
}

__device__ __forceinline__ u64 product(u64 keyed) { return (keyed & 0xffffffff) * (keyed >> 32); }

// What the first `stripes` of a stretch add to lanes 2 * pair and 2 * pair + 1.
__device__ __forceinline__ void sum_stretch(const unsigned char* from, int stripes, int pair, u64* sums) {
    u64 even = 0, odd = 0;
#pragma unroll 4
    for (int stripe = 0; stripe < stripes; stripe++) {
        const uint4 line = *reinterpret_cast<const uint4*>(from + stripe * kStripe + pair * 16);
        const u64 first = line.x | static_cast<u64>(line.y) << 32, second = line.z | static_cast<u64>(line.w) << 32;
        even += second + product(first ^ kSecret[stripe + 2 * pair]);
        odd += first + product(second ^ kSecret[stripe + 2 * pair + 1]);
    }
    sums[2 * pair] = even;
    sums[2 * pair + 1] = odd;
}

__device__ u64 first_accumulator(int lane) {
    switch (lane) {
        case 0: return kPrime32_3;
        case 1: return kPrime64_1;
        case 2: return kPrime64_2;
        case 3: return kPrime64_3;
        case 4: return kPrime64_4;
        case 5: return kPrime32_2;
        case 6: return kPrime64_5;
        default: return kPrime32_1;
    }
}

}  // namespace

// Grid: thread blocks, each takes every gridDim.x-th range.
extern "C" __global__ void __launch_bounds__(KV_THREADS) kv_checksums(const Checksums call) {
    KV_SHARED(shared);
    u64* const sums = reinterpret_cast<u64*>(shared);  // [kStretches][kLanes]
    const int lane = threadIdx.x, pair = threadIdx.x % kPairs, place = threadIdx.x / kPairs;
    for (u64 at = blockIdx.x; at < call.count; at += gridDim.x) {
        const unsigned char* const from = reinterpret_cast<const unsigned char*>(call.ranges[at].address);
        const u64 nbytes = call.ranges[at].nbytes;
        if (nbytes <= 240) {
            if (threadIdx.x == 0) call.ranges[at].sum = short_checksum(from, static_cast<int>(nbytes));
            continue;
        }
        const u64 whole = (nbytes - 1) / kStretch;  // stretches that are scrambled; the last bytes are not
        const int rest = static_cast<int>((nbytes - 1 - whole * kStretch) / kStripe);
        u64 accumulator = first_accumulator(lane);
        for (u64 first = 0; first <= whole; first += kStretches) {
            const u64 stretch = first + place;
            if (stretch <= whole)
                sum_stretch(from + stretch * kStretch, stretch < whole ? kStripes : rest, pair, sums + place * kLanes);
            __syncthreads();
            if (lane < kLanes)
                for (int i = 0; i < kStretches && first + i <= whole; i++) {
                    accumulator += sums[i * kLanes + lane];
                    if (first + i == whole) break;
                    accumulator = (accumulator ^ accumulator >> 47 ^ kSecret[kScramble + lane]) * kPrime32_1;
                }
            __syncthreads();
        }
        if (lane < kLanes) {  // the last stripe, which may overlap the one before it
            const unsigned char* const last = from + nbytes - kStripe;
            const u64 own = bytes_at(last + 8 * lane, 8), neighbour = bytes_at(last + 8 * (lane ^ 1), 8);
            sums[lane] = accumulator + neighbour + product(own ^ secret_at(121 + 8 * lane));
        }
        __syncthreads();
        if (lane == 0) {
            u64 hash = nbytes * kPrime64_1;
            for (int i = 0; i < kPairs; i++)
                hash += folded(sums[2 * i] ^ secret_at(11 + 16 * i), sums[2 * i + 1] ^ secret_at(19 + 16 * i));
            call.ranges[at].sum = avalanche(hash);
        }
        __syncthreads();
    }
}
