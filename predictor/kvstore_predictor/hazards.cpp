// Hazards of classes of chains, and ranks made of them, as estimates.py has them in NumPy: with the same operations in
// the same order, so with the same bits.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int kBins = 24;

}  // namespace

extern "C" {

// `paths` has the nodes of each class, by ladder and step; `counts` the exposed and the returned by node and bin.
// `estimates` gets the hazards by class and ladder, `mixed` their sum by `weights`.
void kv_estimate(int64_t classes, int64_t ladders, int64_t steps, const int64_t* paths, const double* counts,
                 double gain, const double* settings, const double* flat, const double* weights, double* estimates,
                 double* mixed) {
  const double first = gain * settings[0], shrink = gain * settings[1], events = gain * settings[2];
  const double least = settings[3], most = settings[4];
  for (int64_t at = 0; at < classes; ++at, mixed += kBins) {
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
}

// `best` gets the rank at the start of each bin.
void kv_ranks(int64_t classes, const double* hazards, const double* widths, double* best) {
  for (int64_t at = 0; at < classes; ++at, hazards += kBins, best += kBins) {
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
}

}  // extern "C"
