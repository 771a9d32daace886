// Attention of a layer over the documents of a batch: heads' norms and rotary positions, then
// softmax over the keys that a query sees, by the kernels of the Python operators.
#pragma once

#include <array>
#include <vector>

#include "monograph/kernels/rotary/rotary.h"
#include "monograph/kernels/varlen_attention/varlen_attention.h"
#include "monograph/train/activations.h"
#include "monograph/train/base_model.h"
#include "monograph/train/batch.h"
#include "monograph/train/key_values.h"

namespace monograph::train {

// What rotary positions turn by, [length, head_size] each, a table for every rope of the config.
struct Angles {
  struct Table {
    Activations cos, sin;
  };
  Angles(const BaseModel& model, const Batch& batch, const Workers& workers);
  std::vector<Table> tables;
};

// What the forward leaves for the backward.
struct AttentionKept {
  AttentionKept(const BaseModel& model, std::size_t tokens);
  Activations query, key, value;         // of the projections
  Activations turned_query, turned_key;  // with norms and positions
  Activations out;
  std::vector<float> lse;
};

// For one layer and one batch. With a past, the batch is one document that goes on behind it.
class Attention {
 public:
  Attention(const BaseModel& model, std::size_t layer, const Batch& batch, const Angles& angles,
            KeyValues* past = nullptr);

  // From kept.query, key and value to kept.out. Keys and values are appended to the past.
  void forward(AttentionKept& kept, const Workers& workers) const;
  // The gradients of query, key and value, from that of out.
  void backward(const AttentionKept& kept, const Activations& dout, Activations& dquery,
                Activations& dkey, Activations& dvalue, const Workers& workers) const;

 private:
  RotaryProblem turns(std::size_t heads, const std::vector<float>& gain) const;
  AttentionProblem problem() const;

  const BaseModel& model_;
  std::size_t layer_;
  const Batch& batch_;
  const Angles& angles_;
  KeyValues* past_;
  std::array<std::int32_t, 2> past_offsets_;  // of all keys, where there is a past
};

}  // namespace monograph::train
