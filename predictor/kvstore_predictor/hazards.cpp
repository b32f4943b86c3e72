// Hazards of classes of chains, ranks made of them, and the worth of chains by their ranks, as estimates.py and
// eviction_order.py have them in NumPy: with the same operations in the same order, so with the same bits.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

constexpr int kBins = 24;

// One step from a coarse class to a finer one: `estimate` shrinks the finer class's own `exposed` towards what it is.
void Step(bool is_first, const double* exposed, double gain, const double* settings, const double* flat,
          double* estimate) {
  const double first = gain * settings[0], shrink = gain * settings[1], events = gain * settings[2];
  const double* returned = exposed + kBins;
  for (int bin = 0; is_first && bin < kBins; ++bin) {
    estimate[bin] = (returned[bin] + first * flat[bin]) / (exposed[bin] + first);
  }
  for (int bin = 0; !is_first && bin < kBins; ++bin) {
    const double weight = std::max(events / estimate[bin], shrink);
    estimate[bin] = (estimate[bin] * weight + returned[bin]) / (weight + exposed[bin]);
  }
}

// Write a ladder's `found` to `estimates`, and add its share to `mixed`.
void Mix(bool is_first, const double* found, double weight, double* estimates, double* mixed) {
  for (int bin = 0; bin < kBins; ++bin) {
    estimates[bin] = found[bin];
    const double share = weight * found[bin];
    mixed[bin] = is_first ? share : mixed[bin] + share;
  }
}

// The hazards of one class by ladder into `estimates`, and their sum by `weights` into `mixed`. `paths` has the nodes
// of the class, by ladder and step; `counts` the exposed and the returned by node and bin.
void Estimate(int64_t ladders, int64_t steps, const int64_t* paths, const double* counts, double gain,
              const double* settings, const double* flat, const double* weights, double* estimates, double* mixed) {
  for (int64_t ladder = 0; ladder < ladders; ++ladder, paths += steps, estimates += kBins) {
    double estimate[kBins];
    for (int64_t step = 0; step < steps; ++step) {
      Step(step == 0, counts + paths[step] * 2 * kBins, gain, settings, flat, estimate);
    }
    for (double& each : estimate) each = std::min(std::max(each, settings[3]), settings[4]);
    Mix(ladder == 0, estimate, weights[ladder], estimates, mixed);
  }
}

// The same where `known` has the estimates of each node: after its own step, and after all steps of a ladder that ends
// there. `as_of` has the `version` of the counts that each was made of.
void EstimateByNodes(int64_t ladders, int64_t steps, const int64_t* paths, const double* counts, double gain,
                     const double* settings, const double* flat, const double* weights, double* estimates,
                     double* mixed, double* known, int64_t* as_of, int64_t version) {
  for (int64_t ladder = 0; ladder < ladders; ++ladder, paths += steps, estimates += kBins) {
    int64_t depth = 1;  // the nodes of a path come first, and the void node stands for the steps that it lacks
    while (depth < steps && paths[depth] != 0) ++depth;
    const int64_t end = 2 * paths[depth - 1] + 1;
    if (as_of[end] != version) {
      double estimate[kBins];
      int64_t step = depth;
      while (step > 0 && as_of[2 * paths[step - 1]] != version) --step;
      if (step > 0) std::copy_n(known + 2 * paths[step - 1] * kBins, kBins, estimate);
      for (; step < steps; ++step) {
        Step(step == 0, counts + (step < depth ? paths[step] : 0) * 2 * kBins, gain, settings, flat, estimate);
        if (step >= depth) continue;
        std::copy_n(estimate, kBins, known + 2 * paths[step] * kBins);
        as_of[2 * paths[step]] = version;
      }
      for (int bin = 0; bin < kBins; ++bin) {
        known[end * kBins + bin] = std::min(std::max(estimate[bin], settings[3]), settings[4]);
      }
      as_of[end] = version;
    }
    Mix(ladder == 0, known + end * kBins, weights[ladder], estimates, mixed);
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

// Both for some `cells` of tables: `paths`, `estimates`, `mixed` and `ranks` (null: not wanted) have all of them;
// `known` and `as_of` are as above.
void kv_make(int64_t count, const int64_t* cells, int64_t ladders, int64_t steps, const int64_t* paths,
             const double* counts, double gain, const double* settings, const double* flat, const double* widths,
             const double* weights, double* known, int64_t* as_of, int64_t version, double* estimates, double* mixed,
             double* ranks) {
  for (int64_t at = 0; at < count; ++at) {
    const int64_t cell = cells[at];
    EstimateByNodes(ladders, steps, paths + cell * ladders * steps, counts, gain, settings, flat, weights,
                    estimates + cell * ladders * kBins, mixed + cell * kBins, known, as_of, version);
    if (ranks != nullptr) Rank(mixed + cell * kBins, widths, ranks + cell * kBins);
  }
}

// Add `exposed` and `returned`, seen of a class of `cells` in an age bin of `bins`, to `counts` at each of the `nodes`
// that `paths` has of the class, but for the void node.
void kv_count(int64_t seen, int64_t nodes, const int64_t* paths, const int64_t* cells, const int64_t* bins,
              const double* exposed, const double* returned, double* counts) {
  for (int64_t at = 0; at < seen; ++at) {
    const int64_t* path = paths + cells[at] * nodes;
    for (int64_t step = 0; step < nodes; ++step) {
      if (path[step] == 0) continue;
      double* place = counts + path[step] * 2 * kBins + bins[at];
      place[0] += exposed[at];
      if (returned[at] != 0.0) place[kBins] += returned[at];
    }
  }
}

// Take what was seen (`late`, by bin: got through, returned) of the first `most` of `classes` that is `is_late`: the
// classes go to `cells`, `bins`, the numbers and the `estimates` of the `ladders` to `through`, `returned` and `found`.
// `counts` gets how many classes there were, and how many entries.
void kv_seen(int64_t most, int64_t classes, uint8_t* is_late, double* late, const double* estimates, int64_t ladders,
             int64_t* cells, int64_t* bins, double* through, double* returned, double* found, int64_t* counts) {
  int64_t folded = 0, seen = 0;
  for (int64_t cell = 0; cell < classes && folded < most; ++cell) {
    if (is_late[cell] == 0) continue;
    is_late[cell] = 0;
    ++folded;
    double* row = late + cell * 2 * kBins;
    for (int64_t bin = 0; bin < kBins; ++bin) {
      if (row[bin] == 0.0 && row[kBins + bin] == 0.0) continue;
      cells[seen] = cell;
      bins[seen] = bin;
      through[seen] = row[bin];
      returned[seen] = row[kBins + bin];
      for (int64_t ladder = 0; ladder < ladders; ++ladder) {
        found[seen * ladders + ladder] = estimates[(cell * ladders + ladder) * kBins + bin];
      }
      ++seen;
    }
    std::fill(row, row + 2 * kBins, 0.0);
  }
  counts[0] = folded;
  counts[1] = seen;
}

// Of the chains from `first` to `last` that are `live`, note in `used_in` that their `cells` are in use in `epoch`, and
// count in `late` the age bins that they have got through by `now_s`, by the `ends_s` of bins, since those `reached`.
// `found` gets the chains. Return how many there are.
int64_t kv_age(int64_t first, int64_t last, double now_s, const uint8_t* live, const int32_t* cells, int32_t* reached,
               const double* used_s, const double* ends_s, int64_t epoch, int64_t* used_in, uint8_t* is_late,
               double* late, int64_t* found) {
  int64_t count = 0;
  for (int64_t chain = first; chain < last; ++chain) {
    if (live[chain] == 0) continue;
    found[count++] = chain;
    const int64_t cell = cells[chain];
    used_in[cell] = epoch;
    const int64_t passed = std::upper_bound(ends_s, ends_s + kBins, now_s - used_s[chain]) - ends_s;
    if (reached[chain] >= passed) continue;
    is_late[cell] = 1;
    while (reached[chain] < passed) late[cell * 2 * kBins + reached[chain]++] += 1.0;
  }
  return count;
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
