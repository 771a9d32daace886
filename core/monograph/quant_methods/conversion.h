// What becomes of one weight on its way into another checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "monograph/base/dtype.h"
#include "monograph/kernels/quantize/quantize.h"
#include "monograph/quant_methods/word_layouts.h"
#include "monograph/weights/weight.h"

namespace monograph {

enum class Action : std::uint8_t {
  kCopy,      // every part as it is; of a stack of packed matrices: see convert/stacked_copy.h
  kQuantize,  // to a packed format, in the form of a producer: see packed_parts.h
  kCast,      // decoded if packed, then rounded to a float type
  kTurn,      // words of GPTQ or AWQ to rows of compressed-tensors: see convert/turn_words.h
};

// How the tensors of a quantised weight of several experts are named; see packed_parts.h.
enum class Stack : std::uint8_t { kNone, kOwn, kGptOss };

struct Conversion {
  const Weight* weight = nullptr;  // readable, unless it is copied
  Action action = Action::kCopy;
  // For kQuantize; a format of packed_parts.h and a block of it.
  Format format = Format::kNf4;
  std::size_t block = 64;
  bool by_row = false;  // groups of a row: the row is the block
  ScaleRule rule = ScaleRule::kDefault;
  bool double_quant = false;
  NonFinite nonfinite = NonFinite::kError;
  Stack stack = Stack::kNone;  // kOwn and kGptOss: the weight is [experts, outputs, inputs]
  // For kCast.
  DType dtype = DType::kBFloat16;
  // For kTurn.
  std::optional<WordLayout> words = {};
  bool symmetric = false;  // every zero point is the middle code, and none is written
  // The order of columns is written beside every turned weight, also of one that has them in order.
  bool writes_columns = false;
};

}  // namespace monograph
