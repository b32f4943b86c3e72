// Decodes one token's attention over K and V in slow memory, through the engine's own kernels: over all pages where they
// are, or over the pages that the engine chooses, copied to a scratch of the size of a cache. kvflow.py says where in the
// scratch. With overlap a second thread works for the next layer meanwhile. What is between two attentions
// is played by reading as many bytes as a layer has weights.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Operation = void (*)(void* destination, int thread, int threads, void* layer);

struct Call {
    void *destination, *layer;
    int64_t* counter;  // of the kernel: 0 before a call
};

struct Flow {  // kvflow.py's, field by field, 64 bits each
    int64_t layers, kv_heads, head_dim, page_tokens, tokens, pages, wanted;
    int64_t layer_stride, weight_bytes, bound_bytes;  // of one layer: elements of K, bytes
    const uint16_t *keys, *values;              // [layers][tokens][kv_heads][head_dim], layer_stride apart
    const char* bounds;                         // [layers][bound_bytes]
    uint16_t *scratch_keys, *scratch_values;    // [places][page_tokens][head_dim]
    const int32_t *chosen, *places, *source;    // [layers][kv_heads][wanted]; source: index in `expected`, or:
    const int64_t* first_expected;              // [layers + 1]
    const int32_t* expected;                    // [][2]: page * kv_heads + head, place
    const char* weights;                        // [layers][weight_bytes]
    Operation attention, choice;
    const Call *all, *selected, *choosing;      // [layers]
    const uint8_t* marks;                       // of `choosing`: [kv_heads][mark_stride], 1 for a page that is read
    int64_t mark_stride;
    int32_t* tables;                            // of `selected`: [kv_heads][table_stride]
    int64_t table_stride;
    double* seconds;                            // [layers]: from the end of other work to the end of attention
    int64_t unlike;                             // choices that differ from `chosen`
};

constexpr int32_t kHeld = -2;                   // of Flow::source: in the scratch; -1: copied when it is needed
volatile int64_t sink;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void compute(Operation operation, const Call& call) {
    *call.counter = 0;
    operation(call.destination, 0, 1, call.layer);
}

int64_t read_all(const char* bytes, int64_t count) {
    int64_t sum = 0;
    const int64_t* const words = (const int64_t*)bytes;
    for (int64_t i = 0; i < count / 8; i++) sum += words[i];
    return sum;
}

void prefetch(const char* bytes, int64_t count) {
    for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

void copy_rows(const Flow& flow, int64_t layer, int64_t id, int64_t place, int64_t first, int64_t last) {
    const int64_t head = id % flow.kv_heads, page = id / flow.kv_heads, width = flow.kv_heads * flow.head_dim;
    for (int64_t row = first; row < std::min(last, flow.tokens - page * flow.page_tokens); row++) {
        const int64_t from = layer * flow.layer_stride + (page * flow.page_tokens + row) * width + head * flow.head_dim;
        const int64_t to = (place * flow.page_tokens + row) * flow.head_dim;
        std::memcpy(flow.scratch_keys + to, flow.keys + from, flow.head_dim * 2);
        std::memcpy(flow.scratch_values + to, flow.values + from, flow.head_dim * 2);
    }
}

// The pages that `layer` reads, ascending for each K/V head, by the engine's own choice.
void choose(const Flow& flow, int64_t layer, int32_t* chosen) {
    compute(flow.choice, flow.choosing[layer]);
    for (int64_t head = 0; head < flow.kv_heads; head++)
        for (int64_t page = 0; page < flow.pages; page++)
            if (flow.marks[head * flow.mark_stride + page]) *chosen++ = int32_t(page);
}

// A second thread that fetches what a layer will need, and what it has claimed or done of that.
class Fetcher {
  public:
    Fetcher(const Flow& flow, bool is_selecting)
        : flow_(flow), is_selecting_(is_selecting), states_(is_selecting ? flow.first_expected[flow.layers] : 0) {
        thread_ = std::thread([this] { run(); });
    }
    ~Fetcher() {
        begun_.store(flow_.layers, std::memory_order_release);
        thread_.join();
    }
    void begin(int64_t layer) {
        if (layer < flow_.layers) begun_.store(layer, std::memory_order_release);
    }
    // Lets this thread do what the other has not begun. What it is busy with is waited for.
    void finish(int64_t layer, int64_t index) {
        auto& state = states_[flow_.first_expected[layer] + index];
        if (state.load(std::memory_order_acquire) != 2 && !take(layer, index))
            while (state.load(std::memory_order_acquire) != 2) std::this_thread::yield();
    }

  private:
    bool take(int64_t layer, int64_t index) {
        auto& state = states_[flow_.first_expected[layer] + index];
        uint8_t free = 0;
        if (!state.compare_exchange_strong(free, 1)) return false;
        const int32_t* const page = flow_.expected + 2 * (flow_.first_expected[layer] + index);
        copy_rows(flow_, layer, page[0], page[1], 0, flow_.page_tokens);
        state.store(2, std::memory_order_release);
        return true;
    }
    void run() {
        for (int64_t done = -1; done < flow_.layers;) {
            const int64_t layer = begun_.load(std::memory_order_acquire);
            if (layer == done) {
                std::this_thread::yield();
                continue;
            }
            if (layer < flow_.layers) fetch(layer);
            done = layer;
        }
    }
    void fetch(int64_t layer) {
        if (!is_selecting_) {
            const int64_t nbytes = flow_.tokens * flow_.kv_heads * flow_.head_dim * 2;
            sink = read_all((const char*)(flow_.keys + layer * flow_.layer_stride), nbytes);
            sink = read_all((const char*)(flow_.values + layer * flow_.layer_stride), nbytes);
            return;
        }
        prefetch(flow_.bounds + layer * flow_.bound_bytes, flow_.bound_bytes);
        const int64_t count = flow_.first_expected[layer + 1] - flow_.first_expected[layer];
        for (int64_t index = 0; index < count && begun_.load(std::memory_order_relaxed) == layer; index++)
            take(layer, index);
    }

    const Flow& flow_;
    const bool is_selecting_;
    std::vector<std::atomic<uint8_t>> states_;  // 0: not begun, 1: begun, 2: done
    std::atomic<int64_t> begun_{-1};
    std::thread thread_;
};

void attend_selected(Flow& flow, int64_t layer, Fetcher* fetcher) {
    static thread_local std::vector<int32_t> chosen;
    const int64_t count = flow.kv_heads * flow.wanted;
    const int32_t *const planned = flow.chosen + layer * count, *const places = flow.places + layer * count;
    chosen.resize(count);
    choose(flow, layer, chosen.data());
    flow.unlike += !std::equal(chosen.begin(), chosen.end(), planned);
    for (int64_t i = 0; i < count; i++) {
        const int32_t page = planned[i], source = flow.source[layer * count + i];
        const int64_t id = page * flow.kv_heads + i / flow.wanted;
        if (source >= 0 && fetcher)
            fetcher->finish(layer, source);
        else if (source != kHeld)
            copy_rows(flow, layer, id, places[i], 0, flow.page_tokens);
        if (page == flow.pages - 1) {  // K and V of the token itself: just computed
            const int64_t row = (flow.tokens - 1) % flow.page_tokens;
            copy_rows(flow, layer, id, places[i], row, row + 1);
        }
        flow.tables[i / flow.wanted * flow.table_stride + i % flow.wanted] = places[i];
    }
    if (fetcher) fetcher->begin(layer + 1);
    compute(flow.attention, flow.selected[layer]);
}

}  // namespace

extern "C" void kvflow_choose(const Flow* flow, int64_t layer, int32_t* chosen) { choose(*flow, layer, chosen); }

extern "C" void kvflow_token(Flow* flow, int is_selecting, int overlaps) {
    Fetcher* const fetcher = overlaps ? new Fetcher(*flow, is_selecting) : nullptr;
    if (fetcher) fetcher->begin(0);
    for (int64_t layer = 0; layer < flow->layers; layer++) {
        sink = read_all(flow->weights + layer * flow->weight_bytes, flow->weight_bytes);
        const double began = now();
        if (is_selecting) {
            attend_selected(*flow, layer, fetcher);
        } else {
            if (fetcher) fetcher->begin(layer + 1);
            compute(flow->attention, flow->all[layer]);
        }
        flow->seconds[layer] = now() - began;
    }
    delete fetcher;
}

// The seconds of attention alone, the second of two calls: what it reads is in the cache, if it fits.
extern "C" double kvflow_attention_s(const Flow* flow, const Call* call) {
    compute(flow->attention, *call);
    const double began = now();
    compute(flow->attention, *call);
    return now() - began;
}
