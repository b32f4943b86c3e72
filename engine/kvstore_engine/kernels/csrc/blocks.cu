// Moves engine blocks: out of the pool (gather), into it (scatter), within it (move, swap), in merged runs.
//
// The device's twin of block_copy.cpp. A run is consecutive blocks on both sides. Runs are cut into pieces, thread
// blocks take every gridDim.x-th piece of a plane: few of them leave the device to a model's step. Planes and payloads
// are device memory, or host memory that is registered. Every address and block_bytes is a multiple of 16; no block
// may be written twice, or be written and read. Compiled with KV_THREADS.

#include "device.h"

// blocks.py's struct, field by field. All fields are 64 bits wide.
struct BlockRuns {
    const unsigned long long* planes;   // addresses: [blocks][block_bytes]
    const unsigned long long* payloads; // addresses: [planes][blocks_per_payload][block_bytes]
    const int4* runs;                   // payload (unused within the pool), first block there, in the pool, count
    const int* first_pieces;            // [run_count + 1]: pieces before each run
    long long run_count, piece_bytes, block_bytes, blocks_per_payload;
};

namespace {

constexpr int kUnrolled = 4;  // loads of a thread that are under way together
constexpr int kStep = KV_THREADS * 16;

struct Piece {
    int4 run;
    long long offset, bytes;  // in the run
};

__device__ __forceinline__ Piece piece_at(const BlockRuns& call, int piece) {
    int low = 0, high = static_cast<int>(call.run_count);
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (call.first_pieces[middle] <= piece)
            low = middle;
        else
            high = middle;
    }
    const int4 run = call.runs[low];
    const long long offset = (piece - call.first_pieces[low]) * call.piece_bytes;
    const long long rest = run.w * call.block_bytes - offset;
    return {run, offset, rest < call.piece_bytes ? rest : call.piece_bytes};
}

// With kSwap both sides change places.
template <bool kSwap>
__device__ __forceinline__ void transfer(unsigned char* to, unsigned char* from, long long bytes) {
    for (long long at = threadIdx.x * 16; at < bytes; at += kUnrolled * kStep) {
        uint4 lines[kUnrolled], others[kUnrolled];
#pragma unroll
        for (int i = 0; i < kUnrolled; i++) {
            if (at + i * kStep >= bytes) break;
            lines[i] = *reinterpret_cast<const uint4*>(from + at + i * kStep);
            if (kSwap) others[i] = *reinterpret_cast<const uint4*>(to + at + i * kStep);
        }
#pragma unroll
        for (int i = 0; i < kUnrolled; i++) {
            if (at + i * kStep >= bytes) break;
            *reinterpret_cast<uint4*>(to + at + i * kStep) = lines[i];
            if (kSwap) *reinterpret_cast<uint4*>(from + at + i * kStep) = others[i];
        }
    }
}

__device__ __forceinline__ unsigned char* pooled(const BlockRuns& call, int block, long long offset) {
    return reinterpret_cast<unsigned char*>(call.planes[blockIdx.y]) + block * call.block_bytes + offset;
}

__device__ __forceinline__ unsigned char* packed(const BlockRuns& call, const Piece& piece) {
    const long long block = blockIdx.y * call.blocks_per_payload + piece.run.y;
    return reinterpret_cast<unsigned char*>(call.payloads[piece.run.x]) + block * call.block_bytes + piece.offset;
}

}  // namespace

// Grid of each: thread blocks of a plane, planes.
extern "C" __global__ void __launch_bounds__(KV_THREADS) kv_gather_blocks(const BlockRuns call) {
    for (int at = blockIdx.x; at < call.first_pieces[call.run_count]; at += gridDim.x) {
        const Piece piece = piece_at(call, at);
        transfer<false>(packed(call, piece), pooled(call, piece.run.z, piece.offset), piece.bytes);
    }
}

extern "C" __global__ void __launch_bounds__(KV_THREADS) kv_scatter_blocks(const BlockRuns call) {
    for (int at = blockIdx.x; at < call.first_pieces[call.run_count]; at += gridDim.x) {
        const Piece piece = piece_at(call, at);
        transfer<false>(pooled(call, piece.run.z, piece.offset), packed(call, piece), piece.bytes);
    }
}

// From the run's first side to its second.
extern "C" __global__ void __launch_bounds__(KV_THREADS) kv_move_blocks(const BlockRuns call) {
    for (int at = blockIdx.x; at < call.first_pieces[call.run_count]; at += gridDim.x) {
        const Piece piece = piece_at(call, at);
        transfer<false>(pooled(call, piece.run.z, piece.offset), pooled(call, piece.run.y, piece.offset), piece.bytes);
    }
}

extern "C" __global__ void __launch_bounds__(KV_THREADS) kv_swap_blocks(const BlockRuns call) {
    for (int at = blockIdx.x; at < call.first_pieces[call.run_count]; at += gridDim.x) {
        const Piece piece = piece_at(call, at);
        transfer<true>(pooled(call, piece.run.z, piece.offset), pooled(call, piece.run.y, piece.offset), piece.bytes);
    }
}
