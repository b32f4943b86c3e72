// Copies many small runs of bytes: out of host memory into a paged pool, back, and within device memory.
//
// A thread block takes a run at a time, all threads of it 16 bytes each. Few thread blocks leave the device to the steps
// of an engine. Sources and destinations are device memory, or host memory that is registered; every address and number
// of bytes is a multiple of 16. No byte may be written twice, or be written and read. Compiled with KV_THREADS.

typedef unsigned long long u64;

// gather.py's structs, field by field.
struct Run {
    u64 to, source, nbytes;
};
struct Runs {
    const Run* runs;  // memory that the device can read
    u64 count;
};

namespace {

constexpr int kUnrolled = 4;  // loads of a thread that are under way together
constexpr u64 kStep = KV_THREADS * 16;

}  // namespace

extern "C" __global__ void __launch_bounds__(KV_THREADS) kv_copy_runs(const Runs call) {
    for (u64 at = blockIdx.x; at < call.count; at += gridDim.x) {
        const Run run = call.runs[at];
        for (u64 offset = threadIdx.x * 16; offset < run.nbytes; offset += kUnrolled * kStep) {
            uint4 lines[kUnrolled];
#pragma unroll
            for (int i = 0; i < kUnrolled; i++)
                if (offset + i * kStep < run.nbytes)
                    lines[i] = *reinterpret_cast<const uint4*>(run.source + offset + i * kStep);
#pragma unroll
            for (int i = 0; i < kUnrolled; i++)
                if (offset + i * kStep < run.nbytes)
                    *reinterpret_cast<uint4*>(run.to + offset + i * kStep) = lines[i];
        }
    }
}
