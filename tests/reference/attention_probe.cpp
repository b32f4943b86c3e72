// Runs paged_attention.cpp on made-up steps and writes the outputs, float by float, to standard output: built for two
// processors it must write the same bytes. Compiled together with that file, whose operation is called `probed`.

#include "layout.h"

#include <cstdio>
#include <cstring>
#include <vector>

extern "C" void probed(const char* destination, int thread, int threads, void* layer);

namespace {

uint32_t state = 1;
uint32_t random_bits() { return (state = state * 1664525u + 1013904223u) >> 8; }
float random_float() { return float(int32_t(random_bits() % 20001) - 10000) / 5000.f; }

// One plane of `rows` rows of `width` elements, as ggml stores them.
std::vector<char> plane(int type, int64_t rows, int64_t width, int64_t* row_bytes) {
    const int64_t element[] = {4, 2}, block = type == 8 ? 34 : 18;
    *row_bytes = type == 0 || type == 1 || type == 30 ? width * element[type != 0] : width / 32 * block;
    std::vector<char> bytes(rows * *row_bytes);
    for (int64_t i = 0; i < int64_t(bytes.size());) {
        if (type == 0) {
            const float value = random_float();
            std::memcpy(&bytes[i], &value, 4), i += 4;
        } else if (type == 1 || type == 30) {
            const uint16_t base = type == 1 ? 0x2C00 : 0x3E00, spread = type == 1 ? 0x1000 : 0x0180;
            const uint16_t value = uint16_t((random_bits() & 0x8000) | (base + random_bits() % spread));
            std::memcpy(&bytes[i], &value, 2), i += 2;
        } else {
            const uint16_t scale = uint16_t((type == 8 ? 0x2000 : 0x2C00) + random_bits() % 0x400);
            std::memcpy(&bytes[i], &scale, 2);
            for (int64_t k = 2; k < block; k++) bytes[i + k] = char(random_bits());
            i += block;
        }
    }
    return bytes;
}

void probe(int type, int64_t head_dim, int64_t group, int32_t rows, int32_t context, int64_t window, double softcap,
           bool split) {
    const int64_t kv_heads = 2, block_tokens = 16, blocks = (context + 15) / 16, heads = kv_heads * group;
    Step step{};
    const std::vector<char> keys = plane(type, blocks * 16, kv_heads * head_dim, &step.row_bytes);
    const std::vector<char> values = plane(type, blocks * 16, kv_heads * head_dim, &step.row_bytes);
    std::vector<float> queries(rows * heads * head_dim), output(queries.size());
    for (float& value : queries) value = random_float();
    std::vector<int32_t> table(blocks);
    for (int64_t i = 0; i < blocks; i++) table[i] = int32_t(blocks - 1 - i);
    const int32_t sequence[4] = {0, rows, context, 0};
    const int32_t spans = int32_t((context + kSpanKeys - 1) / kSpanKeys);
    std::vector<Item> items;
    for (int32_t head = 0; head < kv_heads; head++)
        for (int32_t span = 0; span < (split ? spans : 1); span++)
            items.push_back(split ? Item{0, head, 0, rows, span, span + 1, spans, head,
                                         int32_t(head * spans * rows * group), spans, {}}
                                  : Item{0, head, 0, rows, 0, 0, 0, 0, 0, 0, {}});
    std::vector<float> partials(kv_heads * spans * rows * group * (head_dim + 32));
    std::vector<int32_t> pending(kv_heads);
    const char* const source = (const char*)queries.data();       // stands for a ggml tensor whose data is at 8
    const void* tensors[4] = {nullptr, source, nullptr, output.data()};
    const void* destination[2] = {&tensors[0], output.data()};    // src[0] at 0, data at 8
    step = Step{heads, kv_heads, head_dim, block_tokens, blocks, type, step.row_bytes, 8, 0, sequence, table.data(),
                int64_t(items.size()), items.data(), partials.data(), pending.data()};
    Layer layer{keys.data(), values.data(), &step, window, 3, 0.2, softcap, 0};
    probed((const char*)destination, 0, 1, &layer);
    std::fwrite(output.data(), sizeof(float), output.size(), stdout);
}

}  // namespace

int main() {
    const int types[] = {0, 1, 2, 8, 30};
    for (int type : types)
        for (int64_t head_dim : {64, 80, 128})
            for (int64_t group : {1, 3, 4, 9})
                for (int32_t rows : {1, 11}) {
                    probe(type, head_dim, group, rows, 90, 0, 0, false);
                    probe(type, head_dim, group, rows, 700, 0, 30, false);
                    probe(type, head_dim, group, rows, 700, 300, 0, true);
                }
}
