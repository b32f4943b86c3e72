// What K and V are stored as, and how eight neighbouring elements become floats.
//
// Owns the formats: IEEE half, bfloat16, float, and ggml's blocks of 32 (ggml-common.h): q8_0 is a half, the scale,
// then 32 int8; q4_0 is a half, the scale, then 16 bytes of which byte i holds element i below and element i + 16
// above, each as its value plus 8.
#pragma once

#include "simd.h"

namespace {

inline float half_to_float(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#elif defined(__aarch64__)
    __fp16 value;
    std::memcpy(&value, &bits, 2);
    return float(value);
#else
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent ? std::ldexp(float(mantissa + 1024), exponent - 25) : std::ldexp(float(mantissa), -24);
    if (exponent == 31) value = mantissa ? NAN : INFINITY;
    return bits >> 15 ? -value : value;
#endif
}

inline float scale_at(const char* block) {
    uint16_t bits;
    std::memcpy(&bits, block, 2);
    return half_to_float(bits);
}

// Each has `widen(row, element)`: elements `element`..`element` + 7 of the row at `row`; `element` is a multiple of 8.
// Those whose blocks hold 32 elements also have `widen_block(block, target)`; the others `floats(row, element)`, which
// gives kLanes elements.
struct Half {
    static constexpr int64_t elements = 1, bytes = 2;  // of one block
    static Floats floats(const char* row, int64_t element) {
        const char* const source = row + 2 * element;
#if defined(__AVX512F__)
        return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source));
#elif defined(__F16C__)
        return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source));
#elif defined(__aarch64__)
        return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)source)));
#else
        return Floats{scale_at(source), scale_at(source + 2), scale_at(source + 4), scale_at(source + 6)};
#endif
    }
    static Eight widen(const char* row, int64_t element) {
        const char* const source = row + 2 * element;
#if defined(__F16C__)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source));
#elif defined(__aarch64__)
        const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16((const uint16_t*)source));
        return {(Floats)vcvt_f32_f16(vget_low_f16(halves)), (Floats)vcvt_f32_f16(vget_high_f16(halves))};
#else
        alignas(32) float target[8];
        for (int i = 0; i < 8; i++) target[i] = scale_at(source + 2 * i);
        return load_eight(target);
#endif
    }
};

struct BFloat {
    static constexpr int64_t elements = 1, bytes = 2;  // of one block
    static Floats floats(const char* row, int64_t element) {
        typedef uint16_t Words __attribute__((vector_size(kLanes * 2)));
        typedef uint32_t Wide __attribute__((vector_size(kLanes * 4)));
        Words words;
        std::memcpy(&words, row + 2 * element, sizeof words);
        return (Floats)(__builtin_convertvector(words, Wide) << 16);
    }
    static Eight widen(const char* row, int64_t element) {
        const char* const source = row + 2 * element;
#if defined(__AVX2__)
        const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)source));
        return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
#else
        alignas(32) uint32_t target[8];
        uint16_t halves[8];
        std::memcpy(halves, source, 16);
        for (int i = 0; i < 8; i++) target[i] = uint32_t(halves[i]) << 16;
        alignas(32) float floats[8];
        std::memcpy(floats, target, 32);
        return load_eight(floats);
#endif
    }
};

struct Single {
    static constexpr int64_t elements = 1, bytes = 4;  // of one block
    static Floats floats(const char* row, int64_t element) {
        Floats value;
        std::memcpy(&value, row + 4 * element, sizeof value);
        return value;
    }
    static Eight widen(const char* row, int64_t element) {
        alignas(32) float target[8];
        std::memcpy(target, row + 4 * element, 32);
        return load_eight(target);
    }
};

// Eight small integers times a scale.
inline Eight scaled(const int8_t* values, float scale) {
#if defined(__AVX2__)
    const __m256i words = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)values));
    return _mm256_mul_ps(_mm256_cvtepi32_ps(words), _mm256_set1_ps(scale));
#elif defined(__aarch64__)
    const int16x8_t words = vmovl_s8(vld1_s8(values));
    return {(Floats)vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), scale),
            (Floats)vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(words))), scale)};
#else
    alignas(32) float target[8];
    for (int i = 0; i < 8; i++) target[i] = float(values[i]) * scale;
    return load_eight(target);
#endif
}

struct EightBit {
    static constexpr int64_t elements = 32, bytes = 34;  // of one block
    static Eight widen(const char* row, int64_t element) {
        const char* const block = row + (element >> 5) * 34;
        return scaled((const int8_t*)block + 2 + (element & 31), scale_at(block));
    }
    static void widen_block(const char* block, float* target) {
        const float scale = scale_at(block);
        for (int i = 0; i < 32; i += 8) store_eight(target + i, scaled((const int8_t*)block + 2 + i, scale));
    }
};

struct FourBit {
    static constexpr int64_t elements = 32, bytes = 18;  // of one block
    static Eight widen(const char* row, int64_t element) {
        const char* const block = row + (element >> 5) * 18;
        uint64_t bytes;
        std::memcpy(&bytes, block + 2 + (element & 15), 8);
        bytes = bytes >> (element & 16 ? 4 : 0) & 0x0F0F0F0F0F0F0F0Full;
        // Each byte less 8, without borrowing from its neighbour: set the high bit, subtract, take it off again.
        bytes = ((bytes | 0x8080808080808080ull) - 0x0808080808080808ull) ^ 0x8080808080808080ull;
        int8_t values[8];
        std::memcpy(values, &bytes, 8);
        return scaled(values, scale_at(block));
    }
    static void widen_block(const char* block, float* target) {
        typedef int8_t Bytes __attribute__((vector_size(16)));
        const float scale = scale_at(block);
        Bytes packed;
        std::memcpy(&packed, block + 2, sizeof packed);
        const Bytes halves[2] = {(packed & 15) - 8, (packed >> 4 & 15) - 8};
        int8_t values[32];
        std::memcpy(values, halves, sizeof values);
        for (int i = 0; i < 32; i += 8) store_eight(target + i, scaled(values + i, scale));
    }
};

}  // namespace
