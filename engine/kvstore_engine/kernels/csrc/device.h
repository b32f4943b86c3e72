// What the kernels need of the machine: copies into shared memory that run beside the arithmetic, and sums over a warp.
//
// Compiled by NVRTC, without any header of CUDA's. A stand-in for a device on the host (the tests have one) brings what
// is under "device alone" and CUDA's own names itself, by a header that its compiler includes first.
#pragma once

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)  // device alone

#define KV_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

// Copy kBytes (4 or 16) from global to shared memory; the lines are there after wait_copies. With `is_there` false zeros
// are written and nothing is read. Before sm_80 the copy is made at once.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool is_there) {
#if __CUDA_ARCH__ >= 800
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
    const int bytes = is_there ? kBytes : 0;
    if constexpr (kBytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
#else
    if constexpr (kBytes == 16)
        *static_cast<uint4*>(to) = is_there ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    else
        *static_cast<unsigned*>(to) = is_there ? *static_cast<const unsigned*>(from) : 0;
#endif
}

// Until all copies that this thread has begun are there. Other threads' need a barrier after it.
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#endif

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = kWarp / 2; step; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int step = kWarp / 2; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
    return value;
}
