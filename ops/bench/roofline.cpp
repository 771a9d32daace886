// monograph::limit_move, limit_tiles and limit_vectors: the bare loops that monograph.bench
// measures beside kernels. They are a library of their own, which `import monograph` does not load.
#include "monograph/kernels/roofline/roofline.h"

#include "arguments/device.h"

namespace monograph::ops {
namespace {

// The same traffic as a dequantisation of `input` into `out`, on torch's threads.
void limit_move(const Tensor& input, const Tensor& out) {
  check_device("limit_move", DeviceType::CPU, {{"input", input}, {"out", out}});
  check_given("limit_move", "input", input);
  check_given("limit_move", "out", out);
  STD_TORCH_CHECK(input.is_contiguous() && out.is_contiguous(),
                  "limit_move: input or out is not contiguous");
  STD_TORCH_CHECK(!overlap(input, out), "limit_move: input and out share memory");
  const auto in_bytes = static_cast<std::size_t>(input.numel()) * input.element_size();
  const auto out_bytes = static_cast<std::size_t>(out.numel()) * out.element_size();
  constexpr std::size_t kChunk = 16384;
  const std::size_t chunks = in_bytes / kChunk;
  STD_TORCH_CHECK(chunks > 0 && in_bytes % kChunk == 0 && out_bytes % in_bytes == 0,
                  "limit_move: ", in_bytes, " and ", out_bytes, " bytes, wanted multiples of ",
                  kChunk);
  const std::size_t out_chunk = out_bytes / chunks;
  const auto* in = static_cast<const std::uint8_t*>(input.const_data_ptr());
  auto* to = static_cast<std::uint8_t*>(out.mutable_data_ptr());
  torch_parallel_for(chunks, 1, [&](std::size_t begin, std::size_t end) {
    move_bytes(in + begin * kChunk, (end - begin) * kChunk, to + begin * out_chunk,
               (end - begin) * out_chunk);
  });
}

constexpr std::int64_t kMostSteps = 1 << 24;  // a second of one core

double limit_tiles(std::int64_t steps) {
  STD_TORCH_CHECK(steps >= 0 && steps <= kMostSteps, "limit_tiles: steps is ", steps,
                  ", wanted 0 to ", kMostSteps);
  return tile_products(static_cast<std::size_t>(steps));
}

double limit_vectors(std::int64_t steps) {
  STD_TORCH_CHECK(steps >= 0 && steps <= kMostSteps, "limit_vectors: steps is ", steps,
                  ", wanted 0 to ", kMostSteps);
  return vector_products(static_cast<std::size_t>(steps));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(monograph, m) {
  m.def("limit_move(Tensor input, Tensor(a!) out) -> ()");
  m.def("limit_tiles(int steps) -> float");
  m.def("limit_vectors(int steps) -> float");
}

// For every device, because there is no portable implementation: limit_move names the device that
// it is refused on.
STABLE_TORCH_LIBRARY_IMPL(monograph, CompositeExplicitAutograd, m) {
  m.impl("limit_move", TORCH_BOX(&limit_move));
  m.impl("limit_tiles", TORCH_BOX(&limit_tiles));
  m.impl("limit_vectors", TORCH_BOX(&limit_vectors));
}

}  // namespace monograph::ops
