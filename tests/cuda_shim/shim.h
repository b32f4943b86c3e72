// A CUDA device on the host: kernels are compiled unchanged by a C++ compiler that includes this first.
//
// The threads of a block are fibres, blocks run one after another. It is strict where hardware is: shared memory starts
// as garbage and has exactly the size of the launch; the target of an asynchronous copy is garbage until it is waited
// for; a barrier that not all threads reach is an error. The order in which fibres run is the launch's `order`: what
// depends on it lacks a barrier.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define KV_SHARED(name) unsigned char* const name = shim::block.shared.get()

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
inline int2 make_int2(int x, int y) { return {x, y}; }

namespace shim {

constexpr unsigned kWarpThreads = 32;
constexpr size_t kStackBytes = 256 << 10;

struct Copy {
    void* to;
    const void* from;
    int bytes;
    bool is_there;
};

struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    dim3 index;
    unsigned shuffles = 0;
    bool is_done = false;
    std::vector<Copy> copies;
};

struct Barrier {
    unsigned expected = 0;
    std::vector<unsigned> waiting;
};

struct Block {
    std::vector<Fibre> fibres;
    std::vector<unsigned> ready;
    Barrier all;
    std::vector<Barrier> warps;
    std::vector<uint64_t> slots;  // two for each thread, used in turn: one barrier a shuffle is enough
    std::unique_ptr<unsigned char[]> shared;
    dim3 index, size, grid;
    unsigned running = 0, order = 0, random = 1;
    ucontext_t scheduler;
    void (*body)(const void*) = nullptr;
    const void* argument = nullptr;
};
inline Block block;

inline void arrive(Barrier& barrier) {
    const unsigned self = block.running;
    barrier.waiting.push_back(self);
    if (barrier.waiting.size() == barrier.expected) {
        block.ready.insert(block.ready.end(), barrier.waiting.begin(), barrier.waiting.end());
        barrier.waiting.clear();
    }
    swapcontext(&block.fibres[self].context, &block.scheduler);
}

inline void enter() {
    block.body(block.argument);
    block.fibres[block.running].is_done = true;
    swapcontext(&block.fibres[block.running].context, &block.scheduler);
}

inline unsigned pick() {
    size_t at = block.order == 1 ? block.ready.size() - 1 : 0;
    if (block.order > 1) {
        block.random = block.random * 1664525u + 1013904223u;
        at = (block.random >> 8) % block.ready.size();
    }
    const unsigned chosen = block.ready[at];
    block.ready.erase(block.ready.begin() + at);
    return chosen;
}

// Whether every thread has ended.
inline bool run_block() {
    const unsigned threads = block.size.x;
    block.all = {threads, {}};
    block.warps.assign(threads / kWarpThreads, {kWarpThreads, {}});
    block.slots.assign(2 * threads, 0);
    block.ready.clear();
    for (unsigned i = 0; i < threads; i++) {
        Fibre& fibre = block.fibres[i];
        fibre.index = {i, 0, 0};
        fibre.shuffles = 0;
        fibre.is_done = false;
        fibre.copies.clear();
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.get();
        fibre.context.uc_stack.ss_size = kStackBytes;
        fibre.context.uc_link = nullptr;
        makecontext(&fibre.context, enter, 0);
        block.ready.push_back(i);
    }
    while (!block.ready.empty()) {
        block.running = pick();
        swapcontext(&block.scheduler, &block.fibres[block.running].context);
    }
    for (const Fibre& fibre : block.fibres)
        if (!fibre.is_done || !fibre.copies.empty()) return false;
    return true;
}

// 0, or 1 when threads wait at a barrier that others never reach or end with copies under way.
template <class Argument>
int launch(void (*)(Argument), void (*body)(const void*), const unsigned* grid, unsigned threads, size_t shared_bytes,
           unsigned order, const void* argument) {
    block.grid = {grid[0], grid[1], grid[2]};
    block.size = {threads, 1, 1};
    block.order = block.random = order;
    block.body = body;
    block.argument = argument;
    block.fibres.clear();
    block.fibres.resize(threads);
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                block.index = {x, y, z};
                block.shared.reset(new unsigned char[shared_bytes]);
                std::memset(block.shared.get(), 0xff, shared_bytes);
                if (!run_block()) return 1;
            }
    return 0;
}

}  // namespace shim

#define SHIM_KERNEL(name, type)                                                                              \
    extern "C" const unsigned long shim_bytes_##name = sizeof(type);                                         \
    extern "C" int shim_##name(const unsigned* grid, unsigned threads, unsigned long shared, unsigned order, \
                               const void* argument) {                                                       \
        return shim::launch(name, [](const void* at) { name(*static_cast<const type*>(at)); }, grid, threads, \
                            shared, order, argument);                                                        \
    }

#define threadIdx (shim::block.fibres[shim::block.running].index)
#define blockIdx (shim::block.index)
#define gridDim (shim::block.grid)

inline void __syncthreads() { shim::arrive(shim::block.all); }

template <class Value>
Value __shfl_xor_sync(unsigned, Value value, int with) {
    shim::Block& block = shim::block;
    const unsigned self = block.running;
    uint64_t* const slots = block.slots.data() + (block.fibres[self].shuffles++ % 2) * block.size.x;
    std::memcpy(slots + self, &value, sizeof value);
    shim::arrive(block.warps[self / shim::kWarpThreads]);
    std::memcpy(&value, slots + (self ^ with), sizeof value);
    return value;
}

template <int kBytes>
void copy_async(void* to, const void* from, bool is_there) {
    std::memset(to, 0xff, kBytes);
    shim::block.fibres[shim::block.running].copies.push_back({to, from, kBytes, is_there});
}

inline void wait_copies() {
    std::vector<shim::Copy>& copies = shim::block.fibres[shim::block.running].copies;
    for (const shim::Copy& copy : copies)
        if (copy.is_there)
            std::memcpy(copy.to, copy.from, copy.bytes);
        else
            std::memset(copy.to, 0, copy.bytes);
    copies.clear();
}

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyintf(value)); }
inline float half_to_float(unsigned short bits) { _Float16 half; std::memcpy(&half, &bits, 2); return static_cast<float>(half); }
inline unsigned short float_to_half(float value) {
    const _Float16 half = static_cast<_Float16>(value);
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
