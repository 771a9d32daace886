// The keys, with their positions, and the values of a document's tokens so far, of one layer: what
// a later token attends to without computing it again.
#pragma once

#include "monograph/train/activations.h"

namespace monograph::train {

class KeyValues {
 public:
  KeyValues(DType dtype, std::size_t width);

  std::size_t tokens() const { return tokens_; }
  const Activations& keys() const { return keys_; }      // [tokens or more, width]
  const Activations& values() const { return values_; }  // the same
  void append(const Activations& keys, const Activations& values);
  void forget() { tokens_ = 0; }

 private:
  Activations keys_, values_;
  std::size_t tokens_ = 0;
};

}  // namespace monograph::train
