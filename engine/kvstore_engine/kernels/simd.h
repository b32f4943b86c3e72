// Vector arithmetic with one meaning on every processor.
//
// Owns the two vector types: `Floats`, as wide as the processor's registers (16 lanes with AVX-512, 8 with AVX2, 4
// elsewhere), and `Eight`, eight lanes everywhere, for sums whose order must not depend on the width. Fused
// multiply-add is always written out (`fma`), and the sources are compiled with -ffp-contract=off: the compiler never
// chooses between one rounding and two, so two loops that compute the same thing give the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

inline Floats load(const float* p) { return *(const Floats*)p; }
inline void store(float* p, Floats x) { *(Floats*)p = x; }
inline Floats splat(float x) { return x - Floats{}; }
inline Ints splat(int32_t x) { return x - Ints{}; }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

inline Ints count_up() {
    Ints lanes{};
    for (int i = 0; i < kLanes; i++) lanes[i] = i;
    return lanes;
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// exp(x) for x <= 0, Cephes' polynomial (2 ulp). Exactly 1 at 0 and exactly 0 below -87, so that a masked key changes
// neither sum nor output by a bit.
inline Floats exponential(Floats x) {
    const Floats clamped = maximum(x, splat(-87.f));
    const Ints power = __builtin_convertvector(fma(clamped, splat(1.44269504f), splat(-0.5f)), Ints);
    const Floats n = __builtin_convertvector(power, Floats);
    const Floats r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
    Floats p = fma(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    const Floats value = fma(p, r * r, r) + 1.f;
    const Ints bits = (power + 127) << 23;
    return x >= splat(-87.f) ? value * (Floats)bits : Floats{};
}

// tanh by way of exponential: the absolute error is one of rounding, the relative error near 0 is not.
inline Floats hyperbolic_tangent(Floats x) {
    const Floats magnitude = x < 0.f ? -x : x;
    const Floats power = exponential(magnitude * -2.f);
    const Floats value = (1.f - power) / (1.f + power);
    return x < 0.f ? -value : value;
}

// ---- eight lanes on every processor ----------------------------------------------------------------------------

#if defined(__AVX2__)

typedef __m256 Eight;
inline Eight load_eight(const float* p) { return _mm256_loadu_ps(p); }
inline void store_eight(float* p, Eight x) { _mm256_storeu_ps(p, x); }
inline Eight times(Eight a, Eight b) { return _mm256_mul_ps(a, b); }
inline Eight plus(Eight a, Eight b) { return _mm256_add_ps(a, b); }
inline Eight lower(Eight a, Eight b) { return _mm256_min_ps(a, b); }
inline Eight higher(Eight a, Eight b) { return _mm256_max_ps(a, b); }
#if defined(__AVX512F__)
inline Eight fma(Eight a, Eight b, Eight c) { return _mm256_fmadd_ps(a, b, c); }
#endif

inline void transpose(Eight* rows) {
    Eight t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    Eight u[8];
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        rows[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

#else

struct Eight {
    Floats low, high;
};
inline Eight load_eight(const float* p) { return {load(p), load(p + 4)}; }
inline void store_eight(float* p, Eight x) { store(p, x.low), store(p + 4, x.high); }
inline Eight times(Eight a, Eight b) { return {a.low * b.low, a.high * b.high}; }
inline Eight plus(Eight a, Eight b) { return {a.low + b.low, a.high + b.high}; }
inline Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
inline Eight lower(Eight a, Eight b) { return {minimum(a.low, b.low), minimum(a.high, b.high)}; }
inline Eight higher(Eight a, Eight b) { return {maximum(a.low, b.low), maximum(a.high, b.high)}; }
inline Eight fma(Eight a, Eight b, Eight c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }

inline void transpose_four(Floats& a, Floats& b, Floats& c, Floats& d) {
#if defined(__aarch64__)
    const float32x4x2_t ab = vtrnq_f32((float32x4_t)a, (float32x4_t)b), cd = vtrnq_f32((float32x4_t)c, (float32x4_t)d);
    a = (Floats)vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0]));
    b = (Floats)vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1]));
    c = (Floats)vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0]));
    d = (Floats)vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1]));
#else
    const Floats w = a, x = b, y = c, z = d;
    a = Floats{w[0], x[0], y[0], z[0]};
    b = Floats{w[1], x[1], y[1], z[1]};
    c = Floats{w[2], x[2], y[2], z[2]};
    d = Floats{w[3], x[3], y[3], z[3]};
#endif
}

inline void transpose(Eight* rows) {
    transpose_four(rows[0].low, rows[1].low, rows[2].low, rows[3].low);
    transpose_four(rows[4].low, rows[5].low, rows[6].low, rows[7].low);
    transpose_four(rows[0].high, rows[1].high, rows[2].high, rows[3].high);
    transpose_four(rows[4].high, rows[5].high, rows[6].high, rows[7].high);
    for (int i = 0; i < 4; i++) std::swap(rows[i].high, rows[i + 4].low);
}

#endif

// The sum of each row's lanes, one lane after another: lane i of the result is rows[i][0] + rows[i][1] + ...
inline Eight sums_of_lanes(Eight* rows) {
    transpose(rows);
    Eight sum{};
    for (int i = 0; i < 8; i++) sum = plus(sum, rows[i]);
    return sum;
}

inline float sum_of_lanes(Eight x) {
    alignas(32) float lane[8];
    store_eight(lane, x);
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

inline float largest_lane(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
    __m128 y = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
#elif defined(__aarch64__)
    return vmaxvq_f32((float32x4_t)x);
#else
    return std::max(std::max(x[0], x[1]), std::max(x[2], x[3]));
#endif
}

}  // namespace
