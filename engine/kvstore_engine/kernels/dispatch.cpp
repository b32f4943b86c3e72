// Chooses among the builds of paged_attention.cpp, page_choice.cpp, q4_product.cpp and q8_product.cpp, one for each instruction
// set, at run time.
//
// This file is compiled for the plainest processor of the architecture, so that one library serves unlike machines.

#include <cstdint>
#include <cstring>

#if defined(KV_HAS_X86)
#include <cpuid.h>
#endif

extern "C" {
typedef void Operation(const char* destination, int thread, int threads, void* userdata);
Operation kv_paged_attention_baseline, kv_page_choice_baseline;
#if defined(KV_HAS_X86)
Operation kv_paged_attention_avx2, kv_paged_attention_avx512, kv_page_choice_avx2, kv_page_choice_avx512;
Operation kv_q4_product_avx2, kv_q4_product_vnni, kv_q8_product_avx2, kv_q8_product_vnni;
#endif
}

namespace {

struct Build {
    const char* name;
    Operation *attention, *page_choice;
    Operation *q4_product, *q8_product;
};

#if defined(KV_HAS_X86)
// What the processor has and the system saves. By hand: Zig's runtime answers no to every __builtin_cpu_supports.
struct Processor {
    bool avx2 = false, avx512 = false, vnni = false;

    Processor() {
        constexpr uint32_t first = bit_FMA | bit_OSXSAVE | bit_AVX | bit_F16C;
        constexpr uint32_t wide = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
        constexpr uint32_t saved = 0x06, widely_saved = 0xe6;  // by the system: registers of 256 and of 512 bits
        uint32_t eax, ebx, ecx, edx;
        if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & first) != first) return;
        if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return;
        __asm__("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
        avx2 = ebx & bit_AVX2 && (eax & saved) == saved;
        avx512 = avx2 && (ebx & wide) == wide && (eax & widely_saved) == widely_saved;
        vnni = avx512 && ecx & bit_AVX512VNNI;
    }
};
#endif

// The builds that this processor can run, the fastest first; ends with an empty name.
struct Builds {
    Build list[4] = {};

    Builds() {
        Build* next = list;
#if defined(KV_HAS_X86)
        const Processor has;
        if (has.avx512)
            *next++ = {"avx512", kv_paged_attention_avx512, kv_page_choice_avx512,
                       has.vnni ? kv_q4_product_vnni : kv_q4_product_avx2, has.vnni ? kv_q8_product_vnni : kv_q8_product_avx2};
        if (has.avx2) *next++ = {"avx2", kv_paged_attention_avx2, kv_page_choice_avx2, kv_q4_product_avx2, kv_q8_product_avx2};
#endif
#if defined(__aarch64__)
        *next++ = {"neon", kv_paged_attention_baseline, kv_page_choice_baseline, nullptr, nullptr};
#else
        *next++ = {"baseline", kv_paged_attention_baseline, kv_page_choice_baseline, nullptr, nullptr};
#endif
        *next = {"", nullptr, nullptr, nullptr, nullptr};
    }
};
const Builds kUsable;

// The build `name`, or an empty one.
const Build& build_of(const char* name) {
    const Build* build = kUsable.list;
    while (build->attention && std::strcmp(build->name, name)) build++;
    return *build;
}

}  // namespace

// The name of the index-th usable build, the fastest first; "" past the last.
extern "C" const char* kv_build_name(int index) {
    const Build* build = kUsable.list;
    while (index-- > 0 && build->attention) build++;
    return build->name;
}

// The attention operation of the build `name`; null if this processor cannot run it or it does not exist.
extern "C" const void* kv_attention_of(const char* name) {
    return (const void*)build_of(name).attention;
}

// The operation that chooses pages for it, in the same build.
extern "C" const void* kv_page_choice_of(const char* name) {
    return (const void*)build_of(name).page_choice;
}

// The same for products with interleaved q4_0 and q8_0 matrices; null also where there is none.
extern "C" const void* kv_q4_product_of(const char* name) {
    return (const void*)build_of(name).q4_product;
}

extern "C" const void* kv_q8_product_of(const char* name) {
    return (const void*)build_of(name).q8_product;
}
