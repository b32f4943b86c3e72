// What a cached element may be: each type widens its stored bits to float and narrows a float to them, to nearest even.
//
// Int8 and Float8 (e4m3: no infinity, greatest value 448) are stored with one float scale for each token and K/V head;
// `widen` gives the value before that scale.
#pragma once

#include "device.h"

struct Unscaled {
    static constexpr bool kScaled = false;
    static constexpr float kGreatest = 1.f;  // of no use
};

struct Single : Unscaled {
    typedef float Stored;
    static __device__ __forceinline__ float widen(Stored bits) { return bits; }
    static __device__ __forceinline__ Stored narrow(float value) { return value; }
};

struct Half : Unscaled {
    typedef unsigned short Stored;
    static __device__ __forceinline__ float widen(Stored bits) { return half_to_float(bits); }
    static __device__ __forceinline__ Stored narrow(float value) { return float_to_half(value); }
};

struct BFloat : Unscaled {
    typedef unsigned short Stored;
    static __device__ __forceinline__ float widen(Stored bits) {
        return __uint_as_float(static_cast<unsigned>(bits) << 16);
    }
    static __device__ __forceinline__ Stored narrow(float value) {
        const unsigned bits = __float_as_uint(value);
        if (value != value) return static_cast<Stored>(bits >> 16 | 0x40);
        return static_cast<Stored>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

struct Int8 {
    typedef signed char Stored;
    static constexpr bool kScaled = true;
    static constexpr float kGreatest = 127.f;
    static __device__ __forceinline__ float widen(Stored bits) { return static_cast<float>(bits); }
    static __device__ __forceinline__ Stored narrow(float value) {  // |value| <= kGreatest
        return static_cast<Stored>(__float2int_rn(value));
    }
};

struct Float8 {
    typedef unsigned char Stored;
    static constexpr bool kScaled = true;
    static constexpr float kGreatest = 448.f;
    // The exponent moves from 4 bits (bias 7) to 8 (bias 127): the float that the bits make is 2^-120 of the value,
    // subnormal ones included.
    static __device__ __forceinline__ float widen(Stored bits) {
        const float small = __uint_as_float(static_cast<unsigned>(bits & 0x7f) << 20);
        const float value = (bits & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : small * 0x1p120f;
        return bits & 0x80 ? -value : value;
    }
    static __device__ __forceinline__ Stored narrow(float value) {  // |value| <= kGreatest
        const unsigned sign = __float_as_uint(value) >> 24 & 0x80;
        const unsigned bits = __float_as_uint(value) & 0x7fffffff;
        if (bits > 0x7f800000) return static_cast<Stored>(sign | 0x7f);
        if (bits < 0x3c800000)  // below 2^-6 steps are 2^-9
            return static_cast<Stored>(sign | __float2int_rn(__uint_as_float(bits) * 512.f));
        return static_cast<Stored>(sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)));
    }
};

// The elements of 16 bytes, which start at a multiple of 16.
template <class Element>
struct Chunk {
    static constexpr int kElements = 16 / sizeof(typename Element::Stored);
    static __device__ __forceinline__ void widen(const unsigned char* from, float* values) {
        union {
            uint4 bytes;
            typename Element::Stored elements[kElements];
        } chunk;
        chunk.bytes = *reinterpret_cast<const uint4*>(from);
#pragma unroll
        for (int i = 0; i < kElements; i++) values[i] = Element::widen(chunk.elements[i]);
    }
};
