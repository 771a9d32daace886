// The GPU's panels of columns on the host harness: the bits of the CPU's kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "monograph/formats/slice.h"
#include "monograph/formats/tests/small_weights.h"
#include "monograph/gpu/host/launch.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/dequantize/gpu_columns.cuh"

namespace monograph::gpu {
namespace {

using host::Order;
using host::Range;

template <class T, class... Fs>
void run(FormatList<Fs...>, const PackedView& view, std::size_t first, std::size_t count, T* out,
         std::span<const Range> memory, Order order) {
  const host::Grid grid = {static_cast<unsigned>(dequantize_blocks(view.rows * count)), 1,
                           kDequantizeThreads};
  bool found = false;
  const auto launch = [&]<class F>() {
    found = true;
    host::launch(grid, memory, order, [&] {
      dequantize_columns_kernel<F, T>(view, static_cast<std::uint32_t>(first),
                                      static_cast<std::uint32_t>(count), out);
    });
  };
  ((view.format == Fs::kFormat ? launch.template operator()<Fs>() : void()), ...);
  ASSERT_TRUE(found);
}

template <class T>
void check(const SmallWeight& w, const PackedView& view, std::size_t first, std::size_t count,
           std::span<const Order> orders) {
  std::vector<T> all(view.elements());
  dequantize(view, dtype_of<T>, all.data(), serial_for);
  std::vector<Range> memory = {host::input(w.values)};
  for (const Bytes& scales : w.scales) memory.push_back(host::input(scales));
  std::vector<Words4> buffer(view.rows * count * sizeof(T) / 16 + 1);
  memory.push_back({buffer.data(), view.rows * count * sizeof(T), true});
  T* const out = reinterpret_cast<T*>(buffer.data());
  PackedView device = view;
  if (w.scales.size() == 4) {
    device.scales.offset = std::numeric_limits<float>::quiet_NaN();
    device.scales.offset_on_device = w.scales[3].data();
  }
  for (const Order order : orders) {
    for (auto& words : buffer) words = {{0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5}};
    run(PackedFormats{}, device, first, count, out, memory, order);
    for (std::size_t row = 0; row < view.rows; ++row)
      ASSERT_EQ(std::memcmp(out + row * count, &all[row * view.cols + first], count * sizeof(T)), 0)
          << w.name << " row " << row << ", columns " << first << " + " << count;
  }
}

template <class T>
class GpuDequantizeColumns : public testing::Test {};
using OutputTypes = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(GpuDequantizeColumns, OutputTypes);

constexpr Order kOne[] = {Order::kScattered};

TYPED_TEST(GpuDequantizeColumns, AnyColumnsOfEveryFormat) {
  for (const SmallWeight& w : small_weights()) {
    const std::size_t cols = w.view.cols;
    for (const std::size_t first : {std::size_t{0}, cols / 3, cols / 2 / 8 * 8}) {
      const std::size_t most = cols - first;
      if (most == 0) continue;
      for (const std::size_t count : {std::size_t{1}, most / 8 * 8, most})
        if (count != 0) check<TypeParam>(w, w.view, first, count, kOne);
    }
  }
}

TYPED_TEST(GpuDequantizeColumns, OfSlicesOfRows) {
  for (const SmallWeight& w : small_weights()) {
    const std::size_t rows = w.view.rows, cols = w.view.cols;
    if (rows < 3 || cols < 2) continue;
    check<TypeParam>(w, slice_rows(w.view, rows / 3, rows / 2), cols / 2, cols - cols / 2, kOne);
  }
}

TYPED_TEST(GpuDequantizeColumns, PanelsOfManyBlocksInEveryOrder) {
  const SmallWeight w = small_weight("nf4", ScaleKind::kFp32, 64, true, {301, 352}, /*seed=*/5);
  for (const std::size_t first : {0u, 128u, 256u})
    check<TypeParam>(w, w.view, first, std::min<std::size_t>(128, 352 - first), host::kOrders);
}

}  // namespace
}  // namespace monograph::gpu
