// Chooses among the builds of paged_attention.cpp, q4_product.cpp and q8_product.cpp, one for each instruction set, at run time.
//
// This file is compiled for the plainest processor of the architecture, so that one library serves unlike machines.

#include <cstring>

extern "C" {
typedef void Operation(const char* destination, int thread, int threads, void* userdata);
Operation kv_paged_attention_baseline;
#if defined(KV_HAS_X86)
Operation kv_paged_attention_avx2, kv_paged_attention_avx512;
Operation kv_q4_product_avx2, kv_q4_product_vnni, kv_q8_product_avx2, kv_q8_product_vnni;
#endif
}

namespace {

struct Build {
    const char* name;
    Operation* attention;
    Operation *q4_product, *q8_product;
};

// The builds that this processor can run, the fastest first; ends with an empty name.
const Build* usable() {
    static Build builds[4];
    static const bool filled = [] {
        Build* next = builds;
#if defined(KV_HAS_X86)
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        const bool vnni = __builtin_cpu_supports("avx512vnni");
        if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
            *next++ = {"avx512", kv_paged_attention_avx512, vnni ? kv_q4_product_vnni : kv_q4_product_avx2,
                       vnni ? kv_q8_product_vnni : kv_q8_product_avx2};
        if (avx2)  // F16C is in every processor that has AVX2
            *next++ = {"avx2", kv_paged_attention_avx2, kv_q4_product_avx2, kv_q8_product_avx2};
#endif
#if defined(__aarch64__)
        *next++ = {"neon", kv_paged_attention_baseline, nullptr, nullptr};
#else
        *next++ = {"baseline", kv_paged_attention_baseline, nullptr, nullptr};
#endif
        *next = {"", nullptr, nullptr, nullptr};
        return true;
    }();
    (void)filled;
    return builds;
}

// The build `name`, or an empty one.
const Build& build_of(const char* name) {
    const Build* build = usable();
    while (build->attention && std::strcmp(build->name, name)) build++;
    return *build;
}

}  // namespace

// The name of the index-th usable build, the fastest first; "" past the last.
extern "C" const char* kv_build_name(int index) {
    const Build* build = usable();
    while (index-- > 0 && build->attention) build++;
    return build->name;
}

// The attention operation of the build `name`; null if this processor cannot run it or it does not exist.
extern "C" const void* kv_attention_of(const char* name) {
    return (const void*)build_of(name).attention;
}

// The same for products with interleaved q4_0 and q8_0 matrices; null also where there is none.
extern "C" const void* kv_q4_product_of(const char* name) {
    return (const void*)build_of(name).q4_product;
}

extern "C" const void* kv_q8_product_of(const char* name) {
    return (const void*)build_of(name).q8_product;
}
