// SPDX-License-Identifier: Apache-2.0
// Plain gradient descent on |y - target|^2 / (2 T): by N ranks, or by one.
#include "ep_data.h"

namespace moec::test {
namespace {

constexpr double kRate = 0.05;  // far from where descent magnifies rounding

void descend(Vec* values, const double* gradient) {
  for (size_t i = 0; i < values->size(); ++i)
    (*values)[i] = static_cast<double>(static_cast<float>((*values)[i] - kRate * gradient[i]));
}

// The experts [begin, end) of p, by gradients in the order of moec_weight_set.
void descend_experts(EpProblem* p, int begin, int end, const Vec& gradients) {
  const double* at = gradients.data();
  for (Vec* all : {&p->weights.gate, &p->weights.up, &p->weights.down}) {
    const size_t each = all->size() / static_cast<size_t>(p->experts);
    Vec own(all->begin() + static_cast<int64_t>(each) * begin,
            all->begin() + static_cast<int64_t>(each) * end);
    descend(&own, at);
    at += own.size();
    std::copy(own.begin(), own.end(), all->begin() + static_cast<int64_t>(each) * begin);
  }
}

// d_y of one batch, and its part of the loss.
double loss_gradient(const Vec& y, const Vec& target, double tokens, Vec* d_y) {
  double loss = 0;
  d_y->resize(y.size());
  for (size_t i = 0; i < y.size(); ++i) {
    (*d_y)[i] = (y[i] - target[i]) / tokens;
    loss += 0.5 * (y[i] - target[i]) * (*d_y)[i];
  }
  return loss;
}

}  // namespace

EpProblem training_problem(int ranks, Draw& draw) {
  EpProblem p;
  p.ranks = ranks;
  p.experts = 3 * ranks + 1;
  p.top_k = p.experts;  // a tie that rounding decides would be another training
  for (int r = 0; r < ranks; ++r) {
    p.begin.push_back(r == 0 ? 0 : 3 * r + 1);  // the first rank has four
    p.tokens.push_back(5 + 3 * r);
  }
  p.begin.push_back(p.experts);
  do {
    p.x.clear();
    p.d_y.clear();
    fill_values(&p, draw);
  } while (!p.weights.up_bias.empty());
  return p;
}

std::vector<double> train_ep(EpProblem p, int rank, const moec_context* context, moec_comm* comm,
                             int steps) {
  const auto r = static_cast<size_t>(rank);
  const Vec target = p.d_y[r];
  const double tokens = static_cast<double>(all_of(p).tokens);
  std::vector<double> losses;
  const auto sum = [&](const Vec& values) {
    Tensors m;
    const moec_tensor t = m.input(values, MOEC_F32, {static_cast<int64_t>(values.size())});
    check(moec_comm_sum(comm, &t, nullptr));
    check(moec_context_sync(context, nullptr));
    return m.read(t);
  };
  for (int step = 0; step < steps; ++step) {
    const Vec y = decode(run_ep_layer(p, rank, context, comm).at("y"), MOEC_F32);
    losses.push_back(sum({loss_gradient(y, target, tokens, &p.d_y[r])})[0]);
    const Outputs out = run_ep_layer(p, rank, context, comm);
    descend_experts(&p, p.begin[r], p.begin[r + 1], decode(out.at("d_experts"), MOEC_F32));
    descend(&p.gate_weight, sum(decode(out.at("d_gate_weight"), MOEC_F32)).data());
  }
  return losses;
}

std::vector<double> train_one(EpProblem p, int steps) {
  Vec target;
  for (const Vec& part : p.d_y) target.insert(target.end(), part.begin(), part.end());
  const double tokens = static_cast<double>(all_of(p).tokens);
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const Vec y = decode(run_one_layer(p).at("y"), MOEC_F32);
    Vec d_y;
    losses.push_back(loss_gradient(y, target, tokens, &d_y));
    auto at = d_y.begin();
    for (Vec& part : p.d_y) {
      std::copy(at, at + static_cast<int64_t>(part.size()), part.begin());
      at += static_cast<int64_t>(part.size());
    }
    const Outputs out = run_one_layer(p);
    descend_experts(&p, 0, p.experts, decode(out.at("d_experts"), MOEC_F32));
    descend(&p.gate_weight, decode(out.at("d_gate_weight"), MOEC_F32).data());
  }
  return losses;
}

}  // namespace moec::test
