// What formats that are decoded to places may meet: groups of every size, tails, and scales that
// are NaN with every payload, infinite, zero, subnormal or the largest. The same bits as with the
// decoded weight.
#include <gtest/gtest.h>

#include "monograph/formats/tests/ggml_weight.h"
#include "monograph/formats/tests/group_weight.h"
#include "monograph/kernels/linear/tests/decoded_weight.h"

namespace monograph {
namespace {

// K, block: a row; whole, half and odd multiples of what kernels take together; tails; no power of
// two; one longer than a chunk.
struct Group {
  std::size_t k, block;
};
constexpr Group kGroups[] = {{500, 500},  {500, 4},     {504, 72},   {1152, 384},
                             {1152, 128}, {2688, 2688}, {2688, 896}, {768, 96},
                             {640, 32},   {260, 20},    {1024, 256}};

TEST(LinearOddScales, GroupsOfEverySize) {
  for (const auto& [info, symmetric] : group_cases()) {
    if (info->kinds[0] != ScaleKind::kFp16) continue;
    for (const auto& [k, block] : kGroups) {
      const GroupWeight w = random_groups(*info, 37, k, block, symmetric, 11);
      SCOPED_TRACE(w.name());
      check_product_bits(w, {1, 2, 13});
    }
  }
}

TEST(LinearOddScales, OneScaleForAll) {
  for (const auto& [info, symmetric] : group_cases()) {
    if (!symmetric) continue;  // zero points come with a scale each
    const GroupWeight w = random_groups(*info, 133, 640, 640, symmetric, 12, GroupScales::kOne);
    SCOPED_TRACE(w.name());
    check_product_bits(w, {1, 4});
  }
}

// Every number in a group of its own, so that it reaches few elements of dx.
void put_odd_scales(GroupWeight& w) {
  const std::vector<std::uint32_t> odd =
      w.info->kinds[0] == ScaleKind::kFp32
          ? std::vector<std::uint32_t>{0x7fffffff, 0xffffffff, 0x7f800001, 0x7fff8000, 0x7f800000,
                                       0xff800000, 0x00000001, 0x80000000, 0x00000000, 0x0d000000,
                                       0x00800000, 0x7f7fffff, 0x8d000001}
      : w.info->kinds[0] == ScaleKind::kBf16
          ? std::vector<std::uint32_t>{0x7fff, 0xffff, 0x7f81, 0x7fc0, 0x7f80, 0xff80, 0x0001,
                                       0x8000, 0x0000, 0x0d00, 0x0080, 0x7f7f, 0x8d01}
          : std::vector<std::uint32_t>{0x7fff, 0xffff, 0x7c01, 0x7e00, 0x7c00, 0xfc00, 0x0001,
                                       0x8000, 0x0000, 0x03ff, 0x0400, 0x7bff, 0x8001};
  ASSERT_LE(odd.size(), w.groups());
  for (std::size_t i = 0; i < odd.size(); ++i) w.scales[(3 * i + 1) * w.groups() + i] = odd[i];
  w.pack();
}

TEST(LinearOddScales, OfGroups) {
  for (const auto& [info, symmetric] : group_cases())
    for (const std::size_t block : {128, 32, 20}) {
      GroupWeight w = random_groups(*info, 45, 14 * block, block, symmetric, 13);
      SCOPED_TRACE(w.name());
      put_odd_scales(w);
      check_product_bits(w, {1, 3, 14, 50});
    }
}

TEST(LinearOddScales, OfGgmlBlocks) {
  constexpr std::uint16_t kOdd[] = {0x7fff, 0xffff, 0x7c01, 0x7e00, 0x7c00, 0xfc00,
                                    0x0001, 0x8000, 0x0000, 0x03ff, 0x7bff};
  for (const FormatInfo* info : ggml_formats()) {
    GgmlWeight w = random_ggml(*info, 80, 12 * info->largest_block, 14);
    SCOPED_TRACE(info->name);
    const auto [scale, minimum] = fp16_places(info->name);
    std::size_t row = 0;
    for (const int at : {scale, minimum})
      for (std::size_t i = 0; at >= 0 && i < std::size(kOdd); ++i, row += 3)
        std::memcpy(w.bytes.data() + (row * 12 + i) * info->block_bytes + at, &kOdd[i], 2);
    w.bind();
    check_product_bits(w, {1, 3, 14, 50});
  }
}

}  // namespace
}  // namespace monograph
