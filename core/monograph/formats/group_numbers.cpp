#include "monograph/formats/group_numbers.h"

#include "monograph/base/error.h"
#include "monograph/formats/all.h"
#include "monograph/formats/row_groups.h"

namespace monograph {
namespace {

int as_signed(const Int4&, int zero) { return zero - Int4::kMiddle; }
int as_signed(const Int8&, Int8::Zero zero) { return zero.value; }
int as_signed(const Fp8Row&, Fp8Row::NoZero) { return 0; }

// The largest codes of E4M3 are 32 apart.
float half_step(const Fp8Row&) { return 16.0f; }
template <class F>
float half_step(const F&) {
  return 0.5f;
}

template <class F>
GroupNumbers numbers_of(const PackedView& weight, std::size_t row, std::size_t group) {
  row += weight.origin_row();
  const std::size_t groups = weight.cols / weight.block;
  const float half = half_step(F{});
  return {group_scale(weight.scales, row * groups + group),
          as_signed(F{}, F::zero_of(weight, row, group)), F::kLowest - half, F::kHighest + half};
}

template <class... Fs>
GroupNumbers numbers_of(FormatList<Fs...>, const PackedView& weight, std::size_t row,
                        std::size_t group) {
  GroupNumbers numbers;
  ((weight.format == Fs::kFormat ? void(numbers = numbers_of<Fs>(weight, row, group)) : void()),
   ...);
  return numbers;
}

}  // namespace

GroupNumbers group_numbers(const PackedView& weight, std::size_t row, std::size_t group) {
  MONOGRAPH_ASSERT(in_list(RowFormats{}, weight.format));
  return numbers_of(RowFormats{}, weight, row, group);
}

}  // namespace monograph
