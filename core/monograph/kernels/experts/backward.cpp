#include <cstring>

#include "monograph/kernels/experts/factors.h"
#include "monograph/kernels/experts/gram.h"
#include "monograph/kernels/experts/layer.h"

namespace monograph {
namespace {

class Backward {
 public:
  Backward(const ExpertsLayer& layer, const Matrix& dy, const ExpertsGradients& want)
      : layer_(layer), problem_(layer.problem), dy_{dy, true}, want_(want) {}

  void run(const void* pre) {
    if (pre == nullptr) {
      own_ = layer_.places_by(problem_.up.out);
      u1_ = layer_.up.low_rank(layer_.x());
      layer_.compute_pre(u1_, own_.data());
      pre = own_.data();
    }
    const bool up = want_.dx != nullptr || want_.dbias1 != nullptr || want_.da1 != nullptr ||
                    want_.db1 != nullptr;
    const bool back = up || want_.dweights != nullptr;
    const bool factors = want_.da2 != nullptr || want_.db2 != nullptr;
    if (want_.dbias2 != nullptr)
      gram_to_rows(layer_, {layer_.place_weights, 1}, dy_, want_.dbias2, problem_.down.bias_dtype);
    Buffer du2;
    if (back || want_.da2 != nullptr) du2 = layer_.down.low_rank_back(dy_);
    Buffer h;
    if (back)
      h = through_activation(pre, du2, up, factors);
    else if (factors)
      h = layer_.activate(pre);
    if (factors) factors_of_down(h, du2);
    h = {};
    if (up) through_up();
  }

 private:
  // The gradients of the second LoRA.
  void factors_of_down(const Buffer& h, const Buffer& du2) {
    const std::size_t rank = problem_.down.rank;
    const ExpertsRows rows = layer_.rows(h.data(), layer_.inner());
    const float* const weights = layer_.place_weights.data();
    if (want_.da2 != nullptr)
      gram_to_rows(layer_, gram_rows(layer_, du2, rank, weights), rows, want_.da2,
                   problem_.down.a_dtype);
    if (want_.db2 != nullptr)
      gram_to_columns(layer_, gram_rows(layer_, layer_.down.low_rank(rows), rank, weights), dy_,
                      want_.db2, problem_.down.b_dtype);
  }

  // dpre, over pre where it is ours; the gradients of the routing weights. Gives h, if it is to be
  // kept, in the memory of dh.
  Buffer through_activation(const void* pre, const Buffer& du2, bool need_dpre, bool keep_h) {
    const std::size_t inner = layer_.inner();
    Buffer dh = layer_.places_by(inner);
    layer_.down.back(dy_, du2, 0, {dh.data(), layer_.kept(), inner, inner});
    if (need_dpre) dpre_ = own_ ? std::move(own_) : layer_.places_by(problem_.up.out);
    std::vector<float> dots(layer_.kept());
    layer_.activate_back(pre, dh, dpre_.data(), dots.data(), keep_h);
    if (want_.dweights != nullptr) weights_of(dots);
    return keep_h ? std::move(dh) : Buffer();
  }

  void weights_of(std::vector<float>& dots) const {
    if (problem_.down.bias != nullptr) add_biases(dots);
    std::vector<float> dweights(problem_.all_slots());
    for (std::size_t i = 0; i < dots.size(); ++i) dweights[layer_.routing.slots[i]] = dots[i];
    convert(dweights.data(), DType::kFloat32, dweights.size(), want_.dweights,
            problem_.weights_dtype);
  }

  // <bias2, dy> of each place.
  void add_biases(std::vector<float>& dots) const {
    const Routing& routing = layer_.routing;
    const auto* dy = static_cast<const std::byte*>(dy_.matrix.data);
    const std::size_t stride = dy_.matrix.stride * layer_.element();
    layer_.parallel_for(routing.active.size(), 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i)
        for (std::size_t place = routing.first(i); place < routing.first(i + 1); ++place)
          dots[place] += layer_.kernels.dot(layer_.down.bias(i),
                                            dy + routing.tokens[place] * stride, problem_.down.out);
    });
  }

  void through_up() {
    const std::size_t rank = problem_.up.rank;
    const ExpertsRows dpre = layer_.rows(dpre_.data(), problem_.up.out);
    Buffer du1;
    if (want_.dx != nullptr || want_.da1 != nullptr) du1 = layer_.up.low_rank_back(dpre);
    if (want_.db1 != nullptr) {
      if (!u1_) u1_ = layer_.up.low_rank(layer_.x());
      gram_to_columns(layer_, gram_rows(layer_, u1_, rank, nullptr), dpre, want_.db1,
                      problem_.up.b_dtype);
    }
    u1_ = {};
    if (want_.da1 != nullptr)
      gram_to_rows(layer_, gram_rows(layer_, du1, rank, nullptr), layer_.x(), want_.da1,
                   problem_.up.a_dtype);
    if (want_.dbias1 != nullptr)
      gram_to_rows(layer_, {std::vector<float>(layer_.kept(), 1.0f), 1}, dpre, want_.dbias1,
                   problem_.up.bias_dtype);
    if (want_.dx == nullptr) return;
    layer_.sum_slots(problem_.up.in, nullptr, want_.dx,
                     [&](std::size_t first_col, const MutableMatrix& strip) {
                       layer_.up.back(dpre, du1, first_col, strip);
                     });
  }

  const ExpertsLayer& layer_;
  const ExpertsProblem& problem_;
  const ExpertsRows dy_;
  const ExpertsGradients& want_;
  Buffer own_, dpre_, u1_;  // own_: pre, computed again
};

}  // namespace

void experts_backward(const ExpertsProblem& problem, const Matrix& dy, const void* pre,
                      const ExpertsGradients& gradients, ParallelFor parallel_for) {
  const ExpertsLayer layer(problem, parallel_for);
  Backward(layer, dy, gradients).run(pre);
}

}  // namespace monograph
