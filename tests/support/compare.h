// SPDX-License-Identifier: Apache-2.0
// The error of every comparison in these tests: per row
//   ||got - ref|| / max(||ref row||, 0.01 * the largest row norm of ref)
// and the worst row counts. One figure over a whole tensor would hide a wrong row; without the
// floor, rows that are rounding noise around an exact 0 would fail exact mathematics. A higher
// floor (kTypicalRow: about what a row of normal values has) is for sums that may cancel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <ostream>

namespace moec::test {

constexpr double kRowFloor = 0.01, kTypicalRow = 0.3;

struct RowError {
  double error = 0;  // infinity when anything is not finite or the sizes differ
  int64_t row = -1;  // the worst row; -1 when there is none
};
inline std::ostream& operator<<(std::ostream& out, const RowError& e) {
  return out << e.error << " in row " << e.row;
}

// got, ref: `rows` rows of `columns` values each, of any arithmetic type. terms: what the values of
// ref are sums of, which may cancel; no row counts as smaller than its terms. shifts: how far each
// value may be from ref for a reason of its own; that much of a row's difference does not count.
// Null: nothing.
template <typename Got, typename Ref>
RowError row_error(const Got* got, const Ref* ref, size_t rows, size_t columns,
                   double floor = kRowFloor, const Ref* terms = nullptr,
                   const Ref* shifts = nullptr) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  double largest = 0;
  for (size_t r = 0; r < rows; ++r) {
    double square = 0;
    for (size_t c = 0; c < columns; ++c) {
      const auto v = static_cast<double>(ref[r * columns + c]);
      square += v * v;
    }
    largest = std::max(largest, std::sqrt(square));
  }
  RowError worst;
  for (size_t r = 0; r < rows; ++r) {
    double square = 0;
    double difference = 0;
    double of_terms = 0;
    double of_shifts = 0;
    for (size_t c = 0; c < columns; ++c) {
      const auto v = static_cast<double>(ref[r * columns + c]);
      const auto term = terms ? static_cast<double>(terms[r * columns + c]) : 0;
      const auto shift = shifts ? static_cast<double>(shifts[r * columns + c]) : 0;
      const double d = static_cast<double>(got[r * columns + c]) - v;
      square += v * v;
      difference += d * d;
      of_terms += term * term;
      of_shifts += shift * shift;
    }
    double error = 0;
    if (!std::isfinite(difference) || !std::isfinite(square) || !std::isfinite(of_shifts))
      error = kInf;
    else if (difference > of_shifts)  // a reference of zeros wants exact zeros
      error = (std::sqrt(difference) - std::sqrt(of_shifts)) /
              std::max(std::sqrt(std::max(square, of_terms)), floor * largest);
    if (worst.row < 0 || error > worst.error) worst = {error, static_cast<int64_t>(r)};
  }
  return worst;
}

template <typename Vec>
double norm_of(const Vec& values) {
  double square = 0;
  for (const double value : values) square += value * value;
  return std::sqrt(square);
}

// The floor for one row of sums over all tokens, which may cancel: other rows of the same sums,
// with a feature of x beside each term, whose size is 1, tell how large the terms are.
template <typename Vec>
double floor_of_sums(const Vec& sums, const Vec& beside_features, size_t features) {
  const double row = norm_of(sums);
  return row == 0 ? 0 : norm_of(beside_features) / std::sqrt(double(features)) / row;
}

// Containers of equal size; rows of `columns` values.
template <typename Got, typename Ref>
RowError row_error(const Got& got, const Ref& ref, size_t columns, double floor = kRowFloor,
                   const Ref& terms = {}, const Ref& shifts = {}) {
  if (got.size() != ref.size() || columns == 0 || ref.size() % columns != 0)
    return {std::numeric_limits<double>::infinity(), -1};
  return row_error(got.data(), ref.data(), ref.size() / columns, columns, floor,
                   terms.empty() ? nullptr : terms.data(),
                   shifts.empty() ? nullptr : shifts.data());
}

}  // namespace moec::test
