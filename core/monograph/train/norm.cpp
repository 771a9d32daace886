#include "monograph/train/norm.h"

#include "monograph/kernels/rms_norm/rms_norm.h"

namespace monograph::train {

void normalise(const ModelConfig& config, const Activations& x, const Activations* residual,
               const std::vector<float>& gain, Activations* sum, Activations& y,
               const Workers& workers) {
  rms_norm({x.dtype(), x.dtype(), config.norm_rounding, x.rows(), x.cols(), x.data(), x.cols(),
            residual == nullptr ? nullptr : residual->data(), x.cols(), gain.data(), config.eps,
            sum == nullptr ? nullptr : sum->data(), y.data()},
           workers.parallel_for);
}

void norm_gradient(const ModelConfig& config, const Activations& dy, const Activations* dsum,
                   const Activations& x, const std::vector<float>& gain, Activations& dx,
                   const Workers& workers) {
  rms_norm_backward({x.dtype(), x.dtype(), config.norm_rounding, x.rows(), x.cols(), dy.data(),
                     x.cols(), dsum == nullptr ? nullptr : dsum->data(), x.cols(), x.data(),
                     x.cols(), gain.data(), config.eps, dx.data(), nullptr},
                    workers.parallel_for);
}

}  // namespace monograph::train
