// Writes to columns at very many rows that are far from each other, as `RowQueue.extend` and `OrderedPolicy.adopt` have
// NumPy do it: the memory of each is asked for before it is written.

#include <cstdint>

namespace {

constexpr int64_t AHEAD = 24;

template <typename Write>
void each(int64_t count, const int64_t* rows, const void* const* columns, int64_t used, Write write) {
    for (int64_t i = 0; i < count; ++i) {
        if (i + AHEAD < count) {
            for (int64_t at = 0; at < used; ++at) {
                __builtin_prefetch(static_cast<const uint32_t*>(columns[at]) + rows[i + AHEAD], 1);
            }
        }
        write(i);
    }
}

}  // namespace

extern "C" {

// Links `rows` in their order: `before` gets the row before each, and `after` the one after it; the ends are left.
void kv_link_rows(int64_t count, const int64_t* rows, int32_t* before, int32_t* after) {
    const void* const columns[] = {before, after};
    each(count, rows, columns, 2, [=](int64_t i) {
        if (i > 0) before[rows[i]] = static_cast<int32_t>(rows[i - 1]);
        if (i + 1 < count) after[rows[i]] = static_cast<int32_t>(rows[i + 1]);
    });
}

// Numbers `rows` in their order from `first` on.
void kv_number_rows(int64_t count, const int64_t* rows, uint32_t first, uint32_t* numbers) {
    const void* const columns[] = {numbers};
    each(count, rows, columns, 1, [=](int64_t i) { numbers[rows[i]] = first + static_cast<uint32_t>(i); });
}

}  // extern "C"
