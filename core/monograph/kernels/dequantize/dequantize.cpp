// The variant list and the parallel driver; no intrinsics here.
#include "monograph/kernels/dequantize/dequantize.h"

#include "monograph/base/error.h"
#include "targets.h"

namespace monograph {

// Defined once for each instruction set, in scalar.cpp, avx2.cpp, avx512.cpp.
template <class V>
DequantizeFn* dequantize_variant(Format format);

namespace {

// Elements a thread takes at least: 64 KiB of bf16, far above the cost of waking it.
constexpr std::size_t kGrain = 32768;

// Blocks that know no rows: one long row splits evenly whatever the shape.
bool is_flat(const PackedView& weight) {
  const BlockShape shape = find_format(weight.format)->shape;
  return shape == BlockShape::kFlat || shape == BlockShape::kRow;
}

PackedView flattened(const PackedView& weight) {
  PackedView flat = weight;
  flat.rows = 1;
  flat.cols = weight.elements();
  return flat;
}

// Rows of a weight whose blocks know them, some at a time.
void dequantize_rows(DequantizeFn* run, const PackedView& weight, DType dtype, std::byte* out,
                     ParallelFor parallel_for, Stores stores) {
  // Streaming stores want every row aligned.
  if (weight.cols % 32 != 0 || weight.block % 32 != 0) stores = Stores::kCached;
  const std::size_t step = weight.cols == 0 ? 1 : ceil_div(kGrain, weight.cols);
  parallel_for(ceil_div(weight.rows, step), 1, [&](std::size_t first, std::size_t last) {
    const std::size_t stop = last * step < weight.rows ? last * step : weight.rows;
    for (std::size_t row = first * step; row < stop; ++row)
      run(weight, row, 0, weight.cols, dtype, stores, out + row * weight.cols * size_bytes(dtype));
  });
}

}  // namespace

const std::vector<Variant<DequantizeFn, ByFormat>>& dequantize_variants() {
  static const auto rows = make_variants<DequantizeFn>(
      VectorTargets{}, every_format(),
      []<class V>(ByFormat key) { return dequantize_variant<V>(key.format); });
  return rows;
}

DequantizeFn* row_decoder(Format format) {
  static const std::vector<DequantizeFn*> found = [] {
    std::vector<DequantizeFn*> runs(256, nullptr);
    for (const FormatInfo& info : formats())
      runs[static_cast<std::size_t>(info.format)] = pick(dequantize_variants(), info.format);
    return runs;
  }();
  return found[static_cast<std::size_t>(format)];
}

void dequantize(const PackedView& weight, DType dtype, void* out, ParallelFor parallel_for,
                Stores stores) {
  // Blocks that begin elsewhere would split the aligned vectors that streaming stores want.
  if (reinterpret_cast<std::uintptr_t>(out) % 64 != 0 || weight.origin % 32 != 0)
    stores = Stores::kCached;
  DequantizeFn* run = pick(dequantize_variants(), weight.format);
  if (run == nullptr) throw Error("dequantize: no variant for this format");
  if (!is_flat(weight))
    return dequantize_rows(run, weight, dtype, static_cast<std::byte*>(out), parallel_for, stores);
  const PackedView flat = flattened(weight);
  const std::size_t step = flat.block < kGrain ? kGrain : flat.block;
  parallel_for(ceil_div(flat.cols, step), 1, [&](std::size_t first, std::size_t last) {
    const std::size_t begin = first * step;
    const std::size_t end = last * step < flat.cols ? last * step : flat.cols;
    run(flat, 0, begin, end, dtype, stores,
        static_cast<std::byte*>(out) + begin * size_bytes(dtype));
  });
}

}  // namespace monograph
