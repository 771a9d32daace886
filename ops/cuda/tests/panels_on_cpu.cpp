// What the GPU's operators do between their kernels, on CPU tensors: the same functions, with
// panels decoded by the CPU's kernels and multiplied by torch's, and few rows summed here
// (tests/python/ops/test_gpu_panels.py). Schemas of their own, with the bytes of a panel as an
// argument.
#include <cmath>
#include <tuple>

#include "cuda/few_rows.h"
#include "cuda/linear_panels.h"
#include "cuda/loss_panels.h"
#include "monograph/base/float_types.h"
#include "monograph/kernels/dequantize/dequantize.h"

namespace monograph::ops {
namespace {

void decode_on_cpu(const PackedView& weight, const Region& region, DType dtype, void* out,
                   void* /*stream*/) {
  DequantizeFn* const run = pick(dequantize_variants(), weight.format);
  for (std::size_t i = 0; i < region.rows; ++i)
    run(weight, region.row + i, region.col, region.col + region.cols, dtype, Stores::kCached,
        static_cast<std::byte*>(out) + i * region.cols * size_bytes(dtype));
}

PanelBackend on_cpu(std::int64_t panel_bytes) {
  return {decode_on_cpu, nullptr, static_cast<std::size_t>(panel_bytes)};
}

Tensor linear(const Tensor& x, const Tensor& values, const std::vector<Tensor>& scales,
              const std::vector<std::int64_t>& layout, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& u, const std::optional<Tensor>& b,
              std::int64_t panel_bytes) {
  const char* const op = "linear";
  const LinearArguments found =
      check_linear(op, x, values, scales, layout, bias, u, b, std::nullopt);
  return linear_by_panels(op, on_cpu(panel_bytes), x, {found.weight, values}, bias, u, b);
}

// The job of a fused kernel as it is defined, with sums of 64 bits.
void few_rows_on_cpu(const gpu::FewRows& job, void* /*stream*/) {
  with_type(job.dtype, [&]<class T>() {
    const std::size_t n = job.weight.rows, depth = job.weight.cols;
    const auto* const x = static_cast<const T*>(job.x);
    const auto* const u = static_cast<const T*>(job.u);
    const auto* const b = static_cast<const T*>(job.b);
    const auto* const bias = static_cast<const T*>(job.bias);
    std::vector<T> w(n * depth);
    decode_on_cpu(job.weight, {0, n, 0, depth}, job.dtype, w.data(), nullptr);
    for (std::size_t row = 0; row < job.rows; ++row)
      for (std::size_t col = 0; col < n; ++col) {
        double sum = 0;
        for (std::size_t k = 0; k < depth; ++k)
          sum += double{to_float(x[row * job.x_stride + k])} * to_float(w[col * depth + k]);
        for (std::size_t r = 0; r < job.rank; ++r)
          sum += double{to_float(u[row * job.u_stride + r])} * to_float(b[col * job.rank + r]);
        if (job.gain != nullptr) sum *= job.gain[col];
        if (bias != nullptr) sum += to_float(bias[col]);
        static_cast<T*>(job.y)[row * job.y_stride + col] = from_float<T>(static_cast<float>(sum));
      }
  });
}

Tensor few_rows(const Tensor& x, const Tensor& values, const std::vector<Tensor>& scales,
                const std::vector<std::int64_t>& layout, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& u, const std::optional<Tensor>& b,
                const std::optional<Tensor>& gain) {
  const char* const op = "few_rows";
  const LinearArguments found =
      check_linear(op, x, values, scales, layout, bias, u, b, std::nullopt);
  return linear_of_few_rows(op, {few_rows_on_cpu}, x, found.weight, bias, u, b, gain);
}

bool takes_few_rows_of(std::int64_t capability, const Tensor& x, const Tensor& values,
                       const std::vector<Tensor>& scales, const std::vector<std::int64_t>& layout) {
  return takes_few_rows(static_cast<int>(capability),
                        check_weight("few_rows", values, scales, layout),
                        rows_of("few_rows", "x", x));
}

Tensor linear_dx(const Tensor& dy, const Tensor& values, const std::vector<Tensor>& scales,
                 const std::vector<std::int64_t>& layout, const std::optional<Tensor>& du,
                 const std::optional<Tensor>& a, std::int64_t panel_bytes) {
  const char* const op = "linear_dx";
  const LinearDxArguments found = check_linear_dx(op, dy, values, scales, layout, du, a);
  std::vector<GradientTerm> terms;
  if (du) terms.push_back(low_rank_term(*du, *a));
  terms.push_back({dy, found.terms[0].weight, values});
  return linear_dx_by_panels(op, on_cpu(panel_bytes), terms);
}

// What the rows of a panel become, by the CPU's kernels of a row.
void loss_rows_on_cpu(const gpu::LossPanel& panel, void* /*stream*/) {
  const CrossEntropyKernels& kernels = *pick(cross_entropy_variants(), ByDType{panel.dtype});
  const std::size_t row_bytes = panel.stride * size_bytes(panel.dtype);
  for (std::size_t i = 0; i < panel.rows; ++i) {
    std::byte* const logits = static_cast<std::byte*>(panel.logits) + i * row_bytes;
    panel.loss[i] = panel.lse[i] = 0;
    if (panel.labels[i] == kIgnoredLabel) {
      if (panel.gradient) std::fill_n(logits, row_bytes, std::byte{0});
      continue;
    }
    const LogitsRow row = {logits, panel.count, static_cast<std::size_t>(panel.labels[i]),
                           panel.map};
    const RowSums sums = kernels.sums(row);
    const double log_sum = std::log(sums.sum);
    panel.loss[i] = static_cast<float>(log_sum + (static_cast<double>(sums.peak) - sums.label));
    panel.lse[i] = static_cast<float>(log_sum + sums.peak);
    if (panel.gradient)
      kernels.gradient(row, sums.peak, static_cast<float>(1 / sums.sum), /*factor=*/1);
  }
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy(
    const Tensor& x, const Tensor& values, const std::vector<Tensor>& scales,
    const std::vector<std::int64_t>& layout, const std::optional<Tensor>& bias,
    const Tensor& labels, double softcap, double scale, bool need_dx, std::int64_t panel_bytes,
    std::int64_t logits_bytes) {
  const char* const op = "linear_cross_entropy";
  const HeadArguments head =
      check_head(op, x, values, scales, layout, bias, labels, softcap, scale);
  const LossBackend backend = {on_cpu(panel_bytes), loss_rows_on_cpu,
                               static_cast<std::size_t>(logits_bytes)};
  const LossOfHead found =
      loss_by_panels(op, backend, head, x, values, bias, need_dx, /*statistics=*/false);
  return {found.loss, found.lse, found.dx};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(monograph_panels, m) {
  m.def(
      "linear(Tensor x, Tensor values, Tensor[] scales, int[] layout, Tensor? bias, Tensor? u, "
      "Tensor? b, int panel_bytes) -> Tensor");
  m.def(
      "few_rows(Tensor x, Tensor values, Tensor[] scales, int[] layout, Tensor? bias, Tensor? u, "
      "Tensor? b, Tensor? gain) -> Tensor");
  m.def(
      "takes_few_rows(int capability, Tensor x, Tensor values, Tensor[] scales, int[] layout) -> "
      "bool");
  m.def(
      "linear_dx(Tensor dy, Tensor values, Tensor[] scales, int[] layout, Tensor? du, Tensor? a, "
      "int panel_bytes) -> Tensor");
  m.def(
      "linear_cross_entropy(Tensor x, Tensor values, Tensor[] scales, int[] layout, Tensor? bias, "
      "Tensor labels, float softcap, float scale, bool need_dx, int panel_bytes, int logits_bytes) "
      "-> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(monograph_panels, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("few_rows", TORCH_BOX(&few_rows));
  m.impl("takes_few_rows", TORCH_BOX(&takes_few_rows_of));
  m.impl("linear_dx", TORCH_BOX(&linear_dx));
  m.impl("linear_cross_entropy", TORCH_BOX(&linear_cross_entropy));
}

}  // namespace monograph::ops
