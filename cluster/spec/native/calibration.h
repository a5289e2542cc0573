/* A calibrator's claims and fit, as in survival.py; the reference is `calibrated` and `observe` of
 * tests/support/spec/in_loops.py.
 */
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

const double MAX_LOGIT = 6.0;

inline double logit(double claimed) {
    const double bound = 1.0 / (1.0 + std::exp(MAX_LOGIT));
    const double value = std::min(std::max(claimed, bound), 1.0 - bound);
    return std::log(value) - std::log1p(-value);
}

/* Interpolates linearly between the knots; constant beyond them. */
inline double interpolated(double x, const double *knots, const double *values, int64_t count) {
    if (!(x > knots[0])) return values[0];
    if (x >= knots[count - 1]) return values[count - 1];
    const int64_t high = std::upper_bound(knots, knots + count, x) - knots, low = high - 1;
    return values[low] + (x - knots[low]) * (values[high] - values[low]) / (knots[high] - knots[low]);
}

/* The calibrated probability of a claim; fit: slope, offset, knots, shifts. */
inline double fitted(double claim, const double *fit, int64_t num_knots) {
    const double shift = interpolated(claim, fit + 2, fit + 2 + num_knots, num_knots);
    return 1.0 / (1.0 + std::exp(-(fit[0] * claim + fit[1] + shift)));
}
