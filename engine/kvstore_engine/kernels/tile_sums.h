// The arithmetic of one tile: scores, their softmax, and the sum of the values.
//
// Owns the order of every sum within a tile (paged_attention.cpp says why it matters). Few rows and many take different
// loops here, with the same order.
#pragma once

#include "tile.h"

namespace {

// ---- scores ----------------------------------------------------------------------------------------------------

// Few rows: lanes are channels modulo 8. Rows rows, eight keys, of which Keys at a time.
template <int Rows, int Keys, class Source>
void score_by_channels(const Pass& pass, int row, const Source& keys, int first) {
    const float* const query = pass.work.queries + row * pass.stride;
    Eight done[Rows][8];
    for (int t = 0; t < 8; t += Keys) {
        Eight sum[Rows][Keys] = {};
        for (int64_t d = 0; d < pass.head_dim; d += 8) {
            Eight channels[Rows];
            for (int r = 0; r < Rows; r++) channels[r] = load_eight(query + r * pass.stride + d);
            for (int i = 0; i < Keys; i++) {
                const Eight key = keys.eight(first + t + i, d);
                for (int r = 0; r < Rows; r++) sum[r][i] = fma(channels[r], key, sum[r][i]);
            }
        }
        for (int r = 0; r < Rows; r++)
            for (int i = 0; i < Keys; i++) done[r][t + i] = sum[r][i];
    }
    for (int r = 0; r < Rows; r++) store_eight(pass.work.scores + (row + r) * kKeys + first, sums_of_lanes(done[r]));
}

template <class Source>
void score_few(const Pass& pass, const Source& keys, int count) {
    for (int row = 0; row < pass.rows;) {
        const int64_t left = pass.rows - row;
        for (int t = 0; t < count; t += 8) {
            if (left == 1)
                score_by_channels<1, 8>(pass, row, keys, t);
            else if (left == 2)
                score_by_channels<2, 4>(pass, row, keys, t);
            else if (left == 4)
                score_by_channels<4, 2>(pass, row, keys, t);
            else
                score_by_channels<3, 4>(pass, row, keys, t);
        }
        row += left == 4 ? 4 : int(std::min<int64_t>(left, 3));
    }
}

// Many rows: lanes are keys; the sum of one channel modulo 8 after the other, for Rows rows and Vectors * kLanes keys.
template <int Rows, int Vectors>
void score_by_keys(const float* queries, int64_t stride, int64_t head_dim, const float* turned, float* scores) {
    Floats sum[Rows][Vectors] = {};
    for (int64_t residue = 0; residue < 8; residue++) {
        Floats part[Rows][Vectors] = {};
        for (int64_t d = residue; d < head_dim; d += 8) {
            Floats key[Vectors];
            for (int v = 0; v < Vectors; v++) key[v] = load(turned + d * kKeys + v * kLanes);
            for (int r = 0; r < Rows; r++) {
                const Floats channel = splat(queries[r * stride + d]);
                for (int v = 0; v < Vectors; v++) part[r][v] = fma(channel, key[v], part[r][v]);
            }
        }
        for (int r = 0; r < Rows; r++)
            for (int v = 0; v < Vectors; v++) sum[r][v] = sum[r][v] + part[r][v];
    }
    for (int r = 0; r < Rows; r++)
        for (int v = 0; v < Vectors; v++) store(scores + r * kKeys + v * kLanes, sum[r][v]);
}

#if defined(__AVX512F__)
constexpr int kScoreRows = 6, kScoreVectors = 2;
#elif defined(__aarch64__)
constexpr int kScoreRows = 3, kScoreVectors = 4;
#else
constexpr int kScoreRows = 3, kScoreVectors = 2;
#endif

void score_many(const Pass& pass, const Widened& keys, int count) {
    const Work& work = pass.work;
    turn(keys, pass.head_dim, work.turned);
    const auto score = [&](auto rows, int row, int t) {
        score_by_keys<rows(), kScoreVectors>(work.queries + row * pass.stride, pass.stride, pass.head_dim,
                                             work.turned + t, work.scores + row * kKeys + t);
    };
    for (int t = 0; t < count; t += kScoreVectors * kLanes) {
        int row = 0;
        for (; row + kScoreRows <= pass.rows; row += kScoreRows) score(std::integral_constant<int, kScoreRows>{}, row, t);
        for (; row < pass.rows; row++) score(std::integral_constant<int, 1>{}, row, t);
    }
}

// ---- softmax ---------------------------------------------------------------------------------------------------

inline Eight every_eighth(const Floats* weights) {
    alignas(64) float lanes[kKeys];
    for (int v = 0; v < kTileVectors; v++) store(lanes + v * kLanes, weights[v]);
    Eight sum = load_eight(lanes);
    for (int t = 8; t < kKeys; t += 8) sum = plus(sum, load_eight(lanes + t));
    return sum;
}

// The keys of a tile that a row sees, as bounds on their number in the tile.
struct Visible {
    Ints limit, start, sinks;
    Visible(const Pass& pass, int row, int64_t first_key) {
        const auto bound = [&](int64_t key) { return splat(int32_t(std::clamp<int64_t>(key - first_key, 0, kKeys))); };
        limit = bound(pass.position(row) + 1);
        start = bound(pass.window_start(row));
        sinks = bound(pass.layer->sink_tokens);
    }
    Floats masked(Floats scores, int vector) const {
        const Ints key = count_up() + vector * kLanes;
        return (key < limit) & ((key >= start) | (key < sinks)) ? scores : splat(-INFINITY);
    }
};

// Scores of one row to weights relative to the new peak of its span; `rescale` is what older sums are multiplied with.
template <bool Masked>
void softmax(const Pass& pass, int row, int64_t first_key) {
    const Work& work = pass.work;
    float* const scores = work.scores + row * kKeys;
    const float cap = float(pass.layer->softcap), before = work.peak[row];
    Floats weight[kTileVectors], largest = splat(before);
    for (int v = 0; v < kTileVectors; v++) {
        weight[v] = load(scores + v * kLanes);
        if (cap != 0) weight[v] = hyperbolic_tangent(weight[v] * (1.f / cap)) * cap;
    }
    if (Masked) {
        const Visible visible(pass, row, first_key);
        for (int v = 0; v < kTileVectors; v++) weight[v] = visible.masked(weight[v], v);
    }
    for (int v = 0; v < kTileVectors; v++) largest = maximum(weight[v], largest);
    const float peak = largest_lane(largest);
    for (int v = 0; v < kTileVectors; v++) {
        weight[v] = exponential(weight[v] - peak);
        store(scores + v * kLanes, weight[v]);
    }
    const Floats rescale = exponential(splat(before - peak));
    work.rescale[row] = rescale[0];
    work.peak[row] = peak;
    work.total[row] = fma(splat(work.total[row]), rescale, splat(sum_of_lanes(every_eighth(weight))))[0];
}

void softmax(const Pass& pass, int64_t first_key) {
    const bool inside = first_key >= pass.window_start(pass.rows - 1) || first_key + kKeys <= pass.layer->sink_tokens;
    if (inside && first_key + kKeys <= pass.position(0) + 1)
        for (int row = 0; row < pass.rows; row++) softmax<false>(pass, row, first_key);
    else
        for (int row = 0; row < pass.rows; row++) softmax<true>(pass, row, first_key);
}

// ---- values ----------------------------------------------------------------------------------------------------

// output[row][channel] = output * rescale + values[:, channel] . weights[row, :], key after key.
template <int Rows, int Vectors, class Source>
void accumulate(const Pass& pass, int row, int64_t channel, const Source& values, int count) {
    float* const output = pass.work.output + row * pass.stride + channel;
    const float* const weights = pass.work.scores + row * kKeys;
    Floats sum[Rows][Vectors];
    for (int r = 0; r < Rows; r++)
        for (int v = 0; v < Vectors; v++)
            sum[r][v] = load(output + r * pass.stride + v * kLanes) * pass.work.rescale[row + r];
    for (int t = 0; t < count; t++) {
        Floats weight[Rows];
        for (int r = 0; r < Rows; r++) weight[r] = splat(weights[r * kKeys + t]);
        for (int v = 0; v < Vectors; v++) {
            const Floats value = values.floats(t, channel + v * kLanes);
            for (int r = 0; r < Rows; r++) sum[r][v] = fma(weight[r], value, sum[r][v]);
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int v = 0; v < Vectors; v++) store(output + r * pass.stride + v * kLanes, sum[r][v]);
}

// Rows rows, all channels, as many at a time as the registers hold.
template <int Rows, class Source>
void accumulate_rows(const Pass& pass, int row, const Source& values, int count) {
    constexpr int vectors = Rows == 4 && kLanes == 8 ? 2 : 4;
    int64_t channel = 0;
    for (; channel + vectors * kLanes <= pass.stride; channel += vectors * kLanes)
        accumulate<Rows, vectors>(pass, row, channel, values, count);
    for (; channel < pass.stride; channel += kLanes) accumulate<Rows, 1>(pass, row, channel, values, count);
}

template <class Source>
void accumulate(const Pass& pass, const Source& values, int count) {
    int row = 0;
    if constexpr (kLanes == 16)  // which comes with 32 registers
        for (; row + 6 <= pass.rows; row += 6) accumulate_rows<6>(pass, row, values, count);
    while (row < pass.rows) {
        const int64_t left = pass.rows - row;
        if (left == 1)
            accumulate_rows<1>(pass, row, values, count);
        else if (left == 2)
            accumulate_rows<2>(pass, row, values, count);
        else if (left == 4)
            accumulate_rows<4>(pass, row, values, count);
        else
            accumulate_rows<3>(pass, row, values, count);
        row += left == 4 ? 4 : int(std::min<int64_t>(left, 3));
    }
}

}  // namespace
