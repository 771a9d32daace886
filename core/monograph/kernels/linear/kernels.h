// The seam between the driver (blocking, threads, scratch) and the units of the instruction sets.
// Forward and dx are the same blocked product, seen from it:
//   out[M,P] = sum over r of left[M,r] * weight(p,r)    P = N, r = K forward; P = K, r = N for dx.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/kernels/linear/operands.h"

namespace monograph {

enum class Pass : std::uint8_t { kForward, kDx };

// `rows` rows from `data` on, columns [begin, begin + count), to one packed block.
struct PackJob {
  const void* data;
  std::size_t stride, rows, begin, count;
  std::byte* out;
};

// For a format whose scales are bytes: its sixteen values times each of the 256 scales, rounded to
// the type of the panel. Filled once per product.
struct alignas(64) CodeTables {
  std::uint16_t entries[256][16];
};

// `width` entries of P from `first`, reduction entries [begin, begin + count), to a panel.
struct DecodeJob {
  const LinearWeight* weight;
  std::size_t first, width, begin, count;
  std::byte* out;
  const CodeTables* tables;
};

// gain * c + bias, rounded, to rows x width elements of `out`; `gain` and `bias` may be nullptr.
struct FinishJob {
  const float* c;
  const float* gain;
  const void* bias;
  std::size_t rows, width;
  void* out;
  std::size_t stride;
};

// c = left * panel, or c += if `accumulate`, for one packed block that holds `rows` rows. Then
// `finish`, unless it is nullptr. A tail is one more step of the reduction, behind the others in
// the panel and packed elsewhere on the left: a rank, mostly, which alone would be more loads and
// stores of the sums than products.
struct MultiplyJob {
  const std::byte* left;
  const std::byte* panel;
  std::size_t rows, width, count;
  float* c;
  bool accumulate;
  const FinishJob* finish;
  const std::byte* tail = nullptr;
};

using DecodeFn = void(const DecodeJob&);

// A panel that is decoded in pieces between the steps of a product: its loads and shuffles then run
// during the tile products instead of before them.
struct DecodeAhead {
  DecodeJob job;
  std::size_t done;    // units of it
  std::size_t blocks;  // products still to come: each takes its share of what is left
};
struct AheadKernels {
  void (*multiply)(const MultiplyJob&, DecodeAhead&);
  void (*rest)(const DecodeAhead&);  // what the products have left undone
  std::size_t least_rows;            // with fewer, decoding first is faster
};

// The product of a block with a panel that is never whole; job.panel is not used. decode.out has
// the room of a panel.
using DirectFn = void(const MultiplyJob&, const DecodeJob& decode);

// A function that has to be given: without a default, an initialiser that leaves it out does not
// compile. (gcc with UBSan does not take `f != nullptr` for a constant.)
template <class F>
class Required {
 public:
  constexpr Required(F* function) : function_(function) {}
  Required(std::nullptr_t) = delete;
  constexpr operator F*() const { return function_; }

 private:
  F* function_;
};

inline constexpr std::size_t kAnyChunks = ~std::size_t{0};

// What an instruction set fills in for a type and a pass. Whoever uses it asks by the functions
// below and never looks whether a part is there.
struct LinearKernels {
  // Every instruction set has these.
  std::size_t block;             // rows of the left operand packed together
  std::size_t panel;             // entries of P computed together
  std::size_t step;              // the reduction is padded with zeros to a multiple of this
  std::size_t chunk;             // reduction of one multiply
  std::size_t left_bytes;        // of one packed element
  std::size_t panel_step_bytes;  // of one step of a panel
  Required<void(const PackJob&)> pack;
  Required<void(const MultiplyJob&)> multiply;
  Required<DecodeFn*(Format format)> decoder;  // nullptr for a format it does not know
  Required<void(const FinishJob&)> finish;     // what `multiply` does last

  // What it may leave out.
  std::size_t load_chunks = kAnyChunks;  // at most so many chunks of the left operand are packed
  std::size_t pass_rows = 0;             // of the left operand at a time; 0: by the cache
  std::size_t few_rows = 0;              // for so many rows or fewer
  const LinearKernels* few = nullptr;    // these kernels give the same bits sooner
  bool takes_tails = false;              // `multiply` and `ahead` know them
  void (*enter)() = nullptr;             // on a thread before and after it multiplies
  void (*leave)() = nullptr;
  bool (*prepare)(const LinearWeight&, CodeTables&) = nullptr;  // false if it needs none
  const AheadKernels* (*ahead)(const DecodeJob&) = nullptr;  // nullptr for a panel to decode first
  DirectFn* (*direct)(const DecodeJob&) = nullptr;           // the same; comes before `ahead`

  constexpr bool has_sizes() const {
    return block != 0 && panel != 0 && step != 0 && chunk % step == 0 && left_bytes != 0 &&
           panel_step_bytes != 0;
  }

  const LinearKernels& for_rows(std::size_t rows) const {
    return few != nullptr && rows <= few_rows ? *few : *this;
  }
  void begin_thread() const {
    if (enter != nullptr) enter();
  }
  void end_thread() const {
    if (leave != nullptr) leave();
  }
  bool fill_tables(const LinearWeight& weight, CodeTables& tables) const {
    return prepare != nullptr && weight.packed.format != Format::kPlain && prepare(weight, tables);
  }
  bool multiplies_directly() const { return direct != nullptr; }
  DirectFn* direct_for(const DecodeJob& job) const {
    return direct == nullptr || job.count == 0 ? nullptr : direct(job);
  }
  // How to decode the panel `next` while `rows` rows are multiplied.
  const AheadKernels* ahead_for(const DecodeJob& next, std::size_t rows) const {
    const AheadKernels* found = ahead == nullptr || next.count == 0 ? nullptr : ahead(next);
    return found != nullptr && rows >= found->least_rows ? found : nullptr;
  }
  void decode(const DecodeJob& job) const {
    if (job.count != 0) decoder(job.weight->packed.format)(job);
  }

  std::size_t steps(std::size_t count) const { return (count + step - 1) / step; }
  std::size_t packed_row_bytes(std::size_t count) const { return steps(count) * step * left_bytes; }
};

}  // namespace monograph
