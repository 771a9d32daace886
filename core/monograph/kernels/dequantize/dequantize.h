// Packed weight -> bf16, fp16 or fp32: out[i] = round(value(code[i]) * scale[block of i]), the
// product rounded to fp32 and then, to nearest even with subnormals kept, to the output type. The
// same bits on every instruction set and for any number of threads.
#pragma once

#include <cstddef>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"
#include "monograph/formats/packed_view.h"
#include "monograph/kernels/keys.h"

namespace monograph {

enum class Stores : std::uint8_t {
  kCached,
  kStreaming,  // past the caches: `out` aligned to 64 bytes, `begin` a multiple of 32
};

// Decodes columns [begin, end) of `row` to `out`, which is aligned to its elements; the weight's
// bytes may lie anywhere. They must not overlap.
using DequantizeFn = void(const PackedView& weight, std::size_t row, std::size_t begin,
                          std::size_t end, DType dtype, Stores stores, void* out);

// Every variant, best instruction set first.
const std::vector<Variant<DequantizeFn, ByFormat>>& dequantize_variants();

// The best of these that this CPU runs, for kernels that decode rows of a format without being
// compiled for it. Never nullptr for a format that is decoded_by_rows().
DequantizeFn* row_decoder(Format format);

// The whole weight to `out`, row-major and contiguous. `stores` is a wish: a misaligned `out` is
// written through the caches.
void dequantize(const PackedView& weight, DType dtype, void* out, ParallelFor parallel_for,
                Stores stores = Stores::kCached);

}  // namespace monograph
