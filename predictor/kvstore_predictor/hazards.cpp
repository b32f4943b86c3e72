// Hazards of classes of chains, ranks made of them, and the worth of chains by their ranks, as estimates.py and
// eviction_order.py have them in NumPy: with the same operations in the same order, so with the same bits.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

constexpr int kBins = 24;

// The hazards of one class by ladder into `estimates`, and their sum by `weights` into `mixed`. `paths` has the nodes
// of the class, by ladder and step; `counts` the exposed and the returned by node and bin.
void Estimate(int64_t ladders, int64_t steps, const int64_t* paths, const double* counts, double gain,
              const double* settings, const double* flat, const double* weights, double* estimates, double* mixed) {
  const double first = gain * settings[0], shrink = gain * settings[1], events = gain * settings[2];
  const double least = settings[3], most = settings[4];
  for (int64_t ladder = 0; ladder < ladders; ++ladder, paths += steps, estimates += kBins) {
    const double* exposed = counts + paths[0] * 2 * kBins;
    const double* returned = exposed + kBins;
    double estimate[kBins];
    for (int bin = 0; bin < kBins; ++bin) {
      estimate[bin] = (returned[bin] + first * flat[bin]) / (exposed[bin] + first);
    }
    for (int64_t step = 1; step < steps; ++step) {
      exposed = counts + paths[step] * 2 * kBins;
      returned = exposed + kBins;
      for (int bin = 0; bin < kBins; ++bin) {
        const double weight = std::max(events / estimate[bin], shrink);
        estimate[bin] = (estimate[bin] * weight + returned[bin]) / (weight + exposed[bin]);
      }
    }
    for (int bin = 0; bin < kBins; ++bin) {
      estimates[bin] = std::min(std::max(estimate[bin], least), most);
      const double share = weights[ladder] * estimates[bin];
      mixed[bin] = ladder == 0 ? share : mixed[bin] + share;
    }
  }
}

// The ranks of one class at the start of each bin into `best`.
void Rank(const double* hazards, const double* widths, double* best) {
  double survival[kBins + 1], held[kBins + 1];
  survival[0] = 1.0;
  held[0] = 0.0;
  for (int bin = 0; bin < kBins; ++bin) {
    survival[bin + 1] = survival[bin] * (1.0 - hazards[bin]);
    const double spent = survival[bin] * widths[bin] * (1.0 - 0.5 * hazards[bin]);
    held[bin + 1] = held[bin] + spent;
  }
  std::fill(best, best + kBins, 0.0);
  for (int horizon = 0; horizon < kBins; ++horizon) {
    const double left = survival[horizon + 1], until = held[horizon + 1];
    for (int bin = 0; bin <= horizon; ++bin) {
      const double rate = (survival[bin] - left) / std::max(until - held[bin], 1e-12);
      best[bin] = std::max(best[bin], rate);
    }
  }
}

int64_t DepthOf(const void* depths, int64_t width, int64_t row) {
  if (width == 2) return static_cast<const uint16_t*>(depths)[row];
  return width == 4 ? static_cast<const uint32_t*>(depths)[row] : static_cast<const int64_t*>(depths)[row];
}

}  // namespace

extern "C" {

// `estimates` gets the hazards by class and ladder, `mixed` their sum by `weights`.
void kv_estimate(int64_t classes, int64_t ladders, int64_t steps, const int64_t* paths, const double* counts,
                 double gain, const double* settings, const double* flat, const double* weights, double* estimates,
                 double* mixed) {
  for (int64_t at = 0; at < classes; ++at) {
    Estimate(ladders, steps, paths + at * ladders * steps, counts, gain, settings, flat, weights,
             estimates + at * ladders * kBins, mixed + at * kBins);
  }
}

// `best` gets the rank at the start of each bin.
void kv_ranks(int64_t classes, const double* hazards, const double* widths, double* best) {
  for (int64_t at = 0; at < classes; ++at) Rank(hazards + at * kBins, widths, best + at * kBins);
}

// Both for some `cells` of tables: `paths`, `estimates`, `mixed` and `ranks` (null: not wanted) have all of them.
void kv_make(int64_t count, const int64_t* cells, int64_t ladders, int64_t steps, const int64_t* paths,
             const double* counts, double gain, const double* settings, const double* flat, const double* widths,
             const double* weights, double* estimates, double* mixed, double* ranks) {
  for (int64_t at = 0; at < count; ++at) {
    const int64_t cell = cells[at];
    Estimate(ladders, steps, paths + cell * ladders * steps, counts, gain, settings, flat, weights,
             estimates + cell * ladders * kBins, mixed + cell * kBins);
    if (ranks != nullptr) Rank(mixed + cell * kBins, widths, ranks + cell * kBins);
  }
}

// Add `exposed` and `returned`, seen of a class of `cells` in an age bin of `bins`, to `counts` at each of the `nodes` that
// `paths` has of the class.
void kv_count(int64_t seen, int64_t nodes, const int64_t* paths, const int64_t* cells, const int64_t* bins,
              const double* exposed, const double* returned, double* counts) {
  for (int64_t at = 0; at < seen; ++at) {
    const int64_t* path = paths + cells[at] * nodes;
    for (int64_t step = 0; step < nodes; ++step) {
      double* place = counts + path[step] * 2 * kBins + bins[at];
      place[0] += exposed[at];
      if (returned[at] != 0.0) place[kBins] += returned[at];
    }
  }
}

// The worth of the last block (`tails`, a row) of each chain from `begin` to `end` that is of `tenant` (below 0: any)
// and not blocked. `slots` and the first `room` of `found` get the chains and their worths, without what `shared` adds,
// the next `room` the ages of the chains. `touched` gets the places among these that `shared` adds to, and in its entry
// `room` how many there are; the next `room` of `found` what `shared` has of them, the last how long ago by `shared_s`.
// `base` gets the ranks, `entry` zeros. The ranks are multiplied by `factors`, which has one for each of the chains in
// their order, if it is not null.
// `due` chains are not for this function: it returns -1 at the first. Else it returns the number of chains.
int64_t kv_worths(int64_t begin, int64_t end, int64_t tenant, double now_s, const int32_t* tails,
                  const uint8_t* blocked, const int32_t* tenants, const uint8_t* live, const int32_t* cells,
                  const int32_t* lengths, const double* used_s, const double* due_s, const void* depths, int64_t width,
                  const double* shared, const double* shared_s, const double* ranks, const double* edges,
                  const double* shares, double leftover, double twice_depth, const double* end_reuse,
                  const double* factors, double* base, int64_t* entry, int64_t* slots, int64_t* touched, double* found,
                  int64_t room) {
  static const int kEnds[] = {0, 0, 1, 2, 2, 3};  // by a distance from the end that is one more
  int64_t count = 0, touches = 0;
  for (int64_t chain = begin; chain < end; ++chain) {
    const int64_t row = tails[chain];
    if (row < 0 || blocked[chain] != 0 || (tenant >= 0 && tenants[chain] != tenant)) continue;
    if (due_s[chain] != 0.0) return -1;
    double worth = leftover;
    const double age_s = now_s - used_s[chain];
    if (live[chain] != 0) {
      const int64_t bin = std::upper_bound(edges + 1, edges + kBins, age_s) - (edges + 1);
      const double share = (std::max(age_s, 0.0) - edges[bin]) * shares[bin];
      const double* at = ranks + static_cast<int64_t>(cells[chain]) * kBins + bin;
      worth = at[0] + share * (at[share > 0.0 ? 1 : 0] - at[0]);
      worth *= edges[kBins - 1] / std::max(age_s, edges[kBins - 1]);
      if (factors != nullptr) worth *= factors[count];
    }
    base[chain] = worth;
    entry[chain] = 0;
    const int64_t depth = DepthOf(depths, width, row);
    const int64_t distance = std::clamp<int64_t>(lengths[chain] - depth, 0, 5);
    worth *= end_reuse[kEnds[distance]];
    worth *= static_cast<double>(depth) / twice_depth + 1.0;
    if (shared[row] != 0.0) {
      found[2 * room + touches] = shared[row];
      found[3 * room + touches] = now_s - shared_s[row];
      touched[touches++] = count;
    }
    slots[count] = chain;
    found[room + count] = age_s;
    found[count++] = worth;
  }
  touched[room] = touches;
  return count;
}

// Of `count` chains `slots` with `worths`, choose those of the least worth: `wanted` and those that are worth as much,
// and of more than twice as many those of the lowest `orders`. Move them to the front of `slots` and `worths`, give
// them `entry` numbers from `first` on, and set `chosen` to their orders. Return how many there are; `ceiling` gets the
// worth of the last.
int64_t kv_least(int64_t count, int64_t wanted, int64_t first, const int64_t* orders, int64_t* slots, double* worths,
                 int64_t* entry, int64_t* chosen, double* ceiling) {
  if (count > wanted) {
    std::vector<double> sorted(worths, worths + count);
    std::nth_element(sorted.begin(), sorted.begin() + wanted, sorted.end());
    *ceiling = sorted[wanted];
    int64_t kept = 0;
    for (int64_t at = 0; at < count; ++at) {
      if (worths[at] <= *ceiling) {
        slots[kept] = slots[at];
        worths[kept++] = worths[at];
      }
    }
    count = kept;
    if (count > 2 * wanted) {
      std::vector<int64_t> last(count);
      for (int64_t at = 0; at < count; ++at) last[at] = orders[slots[at]];
      std::nth_element(last.begin(), last.begin() + (wanted - 1), last.end());
      const int64_t newest = last[wanted - 1];
      kept = 0;
      for (int64_t at = 0; at < count && kept < wanted; ++at) {
        if (orders[slots[at]] <= newest) {
          slots[kept] = slots[at];
          worths[kept++] = worths[at];
        }
      }
      count = kept;
    }
  }
  for (int64_t at = 0; at < count; ++at) {
    entry[slots[at]] = first + at;
    chosen[at] = orders[slots[at]];
  }
  return count;
}

}  // extern "C"
