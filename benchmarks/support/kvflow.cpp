// Decodes one token's attention over K and V in slow memory, through the engine's own kernel: over all pages where they
// are, or over selected pages that were copied to a scratch of the size of a cache. kvflow.py says which pages, and
// where in the scratch. With overlap a second thread works for the next layer meanwhile. What is between two attentions
// is played by reading as many bytes as a layer has weights.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

using Attention = void (*)(void* destination, int thread, int threads, void* layer);

struct Call {
    void *destination, *layer;
    int64_t* counter;  // of the kernel: 0 before a call
};

struct Flow {  // kvflow.py's, field by field, 64 bits each
    int64_t layers, kv_heads, group, head_dim, page_tokens, tokens, pages, wanted, recent, bound_pages;
    int64_t layer_stride, weight_bytes;         // of one layer: elements of K, bytes
    const uint16_t *keys, *values;              // [layers][tokens][kv_heads][head_dim], layer_stride apart
    const float *bounds, *queries;              // [layers][bound_pages][kv_heads][2][head_dim]; [layers][heads][head_dim]
    uint16_t *scratch_keys, *scratch_values;    // [places][page_tokens][head_dim]
    const int32_t *chosen, *places, *source;    // [layers][kv_heads][wanted]; source: index in `expected`, or:
    const int64_t* first_expected;              // [layers + 1]
    const int32_t* expected;                    // [][2]: page * kv_heads + head, place
    const char* weights;                        // [layers][weight_bytes]
    Attention attention;
    const Call *all, *selected;                 // [layers]
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

void attend(const Flow& flow, const Call& call) {
    *call.counter = 0;
    flow.attention(call.destination, 0, 1, call.layer);
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

// The pages that `layer` reads, ascending for each K/V head: the first, the recent ones, and those whose bounds come
// nearest to the best page of any query head.
void choose(const Flow& flow, int64_t layer, int32_t* chosen) {
    const int64_t last = flow.pages - flow.recent, wanted = flow.wanted - 1 - flow.recent, width = flow.head_dim;
    static thread_local std::vector<float> best, scores, sorted;
    for (int64_t head = 0; head < flow.kv_heads; head++, chosen += flow.wanted) {
        best.assign(last, -INFINITY);
        for (int64_t query = 0; query < flow.group; query++) {
            const float* const q = flow.queries + ((layer * flow.kv_heads + head) * flow.group + query) * width;
            scores.assign(last, -INFINITY);
            float top = -INFINITY;
            for (int64_t page = 1; page < last; page++) {
                const float* const low = flow.bounds + (((layer * flow.bound_pages + page) * flow.kv_heads + head) * 2) * width;
                float lanes[16] = {};
                for (int64_t d = 0; d < width; d += 16)
                    for (int64_t i = 0; i < 16; i++) {
                        const float a = q[d + i] * low[d + i], b = q[d + i] * low[width + d + i];
                        lanes[i] += a > b ? a : b;
                    }
                float sum = 0;
                for (float lane : lanes) sum += lane;
                scores[page] = sum;
                top = std::max(top, sum);
            }
            for (int64_t page = 1; page < last; page++) best[page] = std::max(best[page], scores[page] - top);
        }
        sorted.assign(best.begin() + 1, best.end());
        std::nth_element(sorted.begin(), sorted.begin() + wanted - 1, sorted.end(), std::greater<float>());
        const float least = sorted[wanted - 1];
        int64_t equal = wanted - std::count_if(best.begin() + 1, best.end(), [&](float each) { return each > least; });
        int64_t count = 0;
        chosen[count++] = 0;
        for (int64_t page = 1; page < last; page++)
            if (best[page] > least || (best[page] == least && equal-- > 0)) chosen[count++] = int32_t(page);
        for (int64_t page = last; page < flow.pages; page++) chosen[count++] = int32_t(page);
    }
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
        const int64_t bound_bytes = flow_.bound_pages * flow_.kv_heads * 2 * flow_.head_dim * 4;
        if (!is_selecting_) {
            const int64_t nbytes = flow_.tokens * flow_.kv_heads * flow_.head_dim * 2;
            sink = read_all((const char*)(flow_.keys + layer * flow_.layer_stride), nbytes);
            sink = read_all((const char*)(flow_.values + layer * flow_.layer_stride), nbytes);
            return;
        }
        prefetch((const char*)flow_.bounds + layer * bound_bytes, bound_bytes);
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
    attend(flow, flow.selected[layer]);
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
            attend(*flow, flow->all[layer]);
        }
        flow->seconds[layer] = now() - began;
    }
    delete fetcher;
}

// The seconds of attention alone, the second of two calls: what it reads is in the cache, if it fits.
extern "C" double kvflow_attention_s(const Flow* flow, const Call* call) {
    attend(*flow, *call);
    const double began = now();
    attend(*flow, *call);
    return now() - began;
}
