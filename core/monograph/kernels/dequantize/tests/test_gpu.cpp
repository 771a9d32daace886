// The GPU's dequantize on the host harness: the bits of the CPU's kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "monograph/formats/tests/small_weights.h"
#include "monograph/gpu/host/launch.h"
#include "monograph/kernels/dequantize/dequantize.h"
#include "monograph/kernels/dequantize/gpu.cuh"

namespace monograph::gpu {
namespace {

using host::Grid;
using host::Order;
using host::Range;

template <class T, class... Fs>
void run(FormatList<Fs...>, const PackedView& view, T* out, std::span<const Range> memory,
         Order order) {
  const Grid grid = {static_cast<unsigned>(dequantize_blocks(view.elements())), 1,
                     kDequantizeThreads};
  bool found = false;
  const auto launch = [&]<class F>() {
    found = true;
    host::launch(grid, memory, order, [&] { dequantize_kernel<F, T>(view, out); });
  };
  ((view.format == Fs::kFormat ? launch.template operator()<Fs>() : void()), ...);
  ASSERT_TRUE(found);
}

// As on another device, where nobody has read the offset.
PackedView on_device(const SmallWeight& w, PackedView view) {
  if (w.scales.size() != 4) return view;
  view.scales.offset = std::numeric_limits<float>::quiet_NaN();
  view.scales.offset_on_device = w.scales[3].data();
  return view;
}

// What a multiplication of 0 with infinity gives: 0xffc00000 on x86, which is what we promise.
bool nan_is_that_of_x86() {
  volatile float zero = 0.0f, infinity = std::numeric_limits<float>::infinity();
  return as_bits(zero * infinity) == 0xffc00000u;
}

// Bytes of the weight as the kernel may read them; `shift` moves values and scales off their
// alignment, and the output by as many elements.
template <class T>
void check(const SmallWeight& w, const PackedView& view, std::span<const Order> orders,
           std::size_t shift = 0) {
  const std::size_t n = view.elements();
  std::vector<T> want(n);
  dequantize(view, dtype_of<T>, want.data(), serial_for);
  std::vector<Bytes> moved;
  std::vector<Range> memory;
  PackedView device = on_device(w, view);
  const auto move = [&](const Bytes& bytes, const std::uint8_t*& pointer) {
    if (pointer == nullptr) return;
    // One place more in front, so that the copy is as far off as asked.
    Bytes copy(bytes.size() + shift);
    std::copy(bytes.begin(), bytes.end(), copy.begin() + static_cast<std::ptrdiff_t>(shift));
    moved.push_back(std::move(copy));
    pointer = moved.back().data() + shift + (pointer - bytes.data());
    memory.push_back({moved.back().data() + shift, bytes.size(), false});
  };
  moved.reserve(8);
  move(w.values, device.values);
  move(w.scales[0], device.scales.blocks);
  if (w.scales.size() == 2) move(w.scales[1], device.scales.tensor);
  if (w.scales.size() == 4) {
    move(w.scales[1], device.scales.groups);
    move(w.scales[2], device.scales.map);
    move(w.scales[3], device.scales.offset_on_device);
  }
  std::vector<Words4> buffer((n + shift) * sizeof(T) / 16 + 1);
  T* const out = reinterpret_cast<T*>(buffer.data()) + shift;
  memory.push_back({out, n * sizeof(T), true});
  for (const Order order : orders) {
    for (auto& words : buffer) words = {{0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5}};
    run(PackedFormats{}, device, out, memory, order);
    for (std::size_t i = 0; i < n; ++i) {
      const bool equal = std::memcmp(&out[i], &want[i], sizeof(T)) == 0;
      const bool both_nan = std::isnan(to_float(out[i])) && std::isnan(to_float(want[i]));
      ASSERT_TRUE(equal || (both_nan && !nan_is_that_of_x86()))
          << w.name << " element " << i << ": " << to_float(out[i]) << ", wanted "
          << to_float(want[i]) << std::hex << " " << as_bits(to_float(out[i])) << " "
          << as_bits(to_float(want[i]));
    }
  }
}

template <class T>
class GpuDequantize : public testing::Test {};
using OutputTypes = testing::Types<float, Bf16, Fp16>;
TYPED_TEST_SUITE(GpuDequantize, OutputTypes);

constexpr Order kOne[] = {Order::kScattered};

// NaN with payloads, infinities, zeros, the largest and smallest numbers of fp32 and of fp16.
std::vector<float> special_numbers() {
  std::vector<float> all;
  for (const std::uint32_t magnitude :
       {0x00000000u, 0x00000001u, 0x00000003u, 0x00400000u, 0x007fffffu, 0x00800000u, 0x33000001u,
        0x33800000u, 0x387fffffu, 0x3f800000u, 0x3f8ccccdu, 0x477fe000u, 0x477ff000u, 0x7e967699u,
        0x7f000000u, 0x7f7fffffu, 0x7f800000u, 0x7fc00000u, 0x7f812345u})
    for (const std::uint32_t sign : {0u, 0x80000000u}) all.push_back(as_float(magnitude | sign));
  return all;
}

void fill_codes(SmallWeight& w) {
  for (std::size_t i = 0; i < w.values.size(); ++i)
    w.values[i] = static_cast<std::uint8_t>(w.info->bits == 8 ? i : i * 17);
}
void put(Bytes& bytes, std::size_t i, float x) { std::memcpy(bytes.data() + 4 * i, &x, 4); }

TYPED_TEST(GpuDequantize, EveryCodeUnderSpecialScales) {
  const std::vector<float> special = special_numbers();
  for (const char* format : {"nf4", "fp4"}) {
    SmallWeight w =
        small_weight(format, ScaleKind::kFp32, 32, false, {special.size(), 32}, /*seed=*/1);
    fill_codes(w);
    for (std::size_t i = 0; i < special.size(); ++i) put(w.scales[0], i, special[i]);
    check<TypeParam>(w, w.view, host::kOrders);
  }
}

// The map holds the numbers `map`, each of the groups of 256 blocks one of `groups`.
template <class T>
void check_nested(const char* format, const std::vector<float>& map,
                  const std::vector<float>& groups, float offset) {
  SmallWeight w = small_weight(format, ScaleKind::kFp32, 32, true, {256 * groups.size(), 32}, 2);
  fill_codes(w);
  for (std::size_t i = 0; i < w.scales[0].size(); ++i)
    w.scales[0][i] = static_cast<std::uint8_t>(i % map.size());
  for (std::size_t i = 0; i < map.size(); ++i) put(w.scales[2], i, map[i]);
  for (std::size_t i = 0; i < groups.size(); ++i) put(w.scales[1], i, groups[i]);
  put(w.scales[3], 0, offset);
  w.view = bound(w);
  check<T>(w, w.view, kOne);
}

// Where two different NaN meet, it is the compiler's choice which one is kept: one place at a time.
TYPED_TEST(GpuDequantize, EveryCodeUnderSpecialNestedScales) {
  std::vector<float> all = special_numbers(), numbers, finite;
  std::copy_if(all.begin(), all.end(), std::back_inserter(numbers), [](float x) { return x == x; });
  std::copy_if(all.begin(), all.end(), std::back_inserter(finite),
               [](float x) { return std::isfinite(x); });
  for (const char* format : {"nf4", "fp4"}) {
    for (const float offset : {-0.0f, 0.7f, 0x1p-149f, as_float(0xff800000u)}) {
      check_nested<TypeParam>(format, all, numbers, offset);
      check_nested<TypeParam>(format, numbers, all, offset);
    }
    check_nested<TypeParam>(format, finite, finite, as_float(0x7fc12345u));
  }
}

TYPED_TEST(GpuDequantize, EveryCodeUnderEveryScaleByte) {
  const std::vector<float> special = special_numbers();
  for (const char* format : {"mxfp4", "mxfp8", "nvfp4", "nvfp4-divide"}) {
    const FormatInfo& info = *find_format(format);
    const std::size_t cols = info.bits == 8 ? 256 : 32;
    for (const float tensor : special) {
      SmallWeight w = small_weight(format, info.kinds[0], info.smallest_block, false, {256, cols},
                                   /*seed=*/3);
      fill_codes(w);
      const std::size_t blocks = w.scales[0].size() / 256;
      for (std::size_t i = 0; i < w.scales[0].size(); ++i)
        w.scales[0][i] = static_cast<std::uint8_t>(i / blocks);
      if (w.scales.size() == 2) {
        // Two different NaN: which of them a product keeps is the processor's choice.
        for (std::size_t i = 0; i < w.scales[0].size(); ++i)
          if (std::isnan(tensor) && (w.scales[0][i] & 0x7f) == 0x7f) w.scales[0][i] = 1;
        put(w.scales[1], 0, tensor);
      }
      check<TypeParam>(w, w.view, kOne);
      if (w.scales.size() == 1) break;
    }
  }
}

TYPED_TEST(GpuDequantize, SquareBlocksUnderSpecialScales) {
  const std::vector<float> special = special_numbers();
  for (const ScaleKind kind : {ScaleKind::kFp32, ScaleKind::kBf16, ScaleKind::kE8m0}) {
    // Two rows of 128 hold all codes; each scale has a matrix of two rows.
    const std::size_t count = kind == ScaleKind::kE8m0 ? 256 : special.size();
    SmallWeight w = small_weight("fp8-block", kind, 128, false, {count, 2, 128}, /*seed=*/4);
    fill_codes(w);
    for (std::size_t i = 0; i < count; ++i) {
      if (kind == ScaleKind::kFp32) put(w.scales[0], i, special[i]);
      if (kind == ScaleKind::kBf16)
        std::memcpy(&w.scales[0][2 * i], reinterpret_cast<const char*>(&special[i]) + 2, 2);
      if (kind == ScaleKind::kE8m0) w.scales[0][i] = static_cast<std::uint8_t>(i);
    }
    check<TypeParam>(w, w.view, kOne);
  }
}

TYPED_TEST(GpuDequantize, OddSizesAndTailsInEveryOrder) {
  for (const SmallWeight& w : small_weights()) check<TypeParam>(w, w.view, host::kOrders);
}

TYPED_TEST(GpuDequantize, BytesAndOutputAtAnyAddress) {
  for (const SmallWeight& w : small_weights())
    for (const std::size_t shift : {1u, 2u, 3u, 4u}) check<TypeParam>(w, w.view, kOne, shift);
}

TYPED_TEST(GpuDequantize, PanelsOfRows) {
  for (const SmallWeight& w : small_weights())
    for (std::size_t first = 0; first < w.view.rows; first += 1 + w.view.rows / 7) {
      const std::size_t most = w.view.rows - first;
      for (const std::size_t count : {std::size_t{1}, std::min<std::size_t>(most, 5), most})
        check<TypeParam>(w, slice_rows(w.view, first, count), kOne);
    }
}

TYPED_TEST(GpuDequantize, AWeightOfManyBlocks) {
  const SmallWeight w = small_weight("nf4", ScaleKind::kFp32, 64, true, {301, 353}, /*seed=*/5);
  check<TypeParam>(w, w.view, host::kOrders);
}

}  // namespace
}  // namespace monograph::gpu
