// The model as it answers: tokens go in behind those that are there, the logits of the next come
// out. Layers are those of the trained model; keys and values of what is behind them are kept.
//
// Without a matrix unit a token's logits have the same bits however the tokens before it came: one
// by one, at once, or without a past. With AMX (bf16) the attention of few queries, at most
// kFewQueries, is vector code and rounds otherwise: the bits are a function of where the calls cut
// the tokens, and still of nothing else. Neither threads nor what was asked before changes a bit.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "monograph/train/layer.h"

namespace monograph::train {

class Decoder {
 public:
  // Both must outlive it; the parameters may be those of no adapter at all.
  Decoder(const BaseModel& base, const LoraParameters& parameters, const Workers& workers);

  std::size_t tokens() const { return tokens_; }

  // Appends tokens, at least one, and gives the logits [vocabulary] behind the last of them, valid
  // until the next call: rounded to the type of the model. Throws Error for a token that is not in
  // the vocabulary, and for more tokens than max_position_embeddings; nothing is appended then.
  std::span<const float> append(std::span<const std::int64_t> ids);
  // All tokens: the next call begins another prompt.
  void forget();

 private:
  // Of a call of so many tokens.
  struct Room {
    Room(const BaseModel& base, std::size_t tokens);
    Activations h, next;
    LayerKept kept;
  };
  void check(std::span<const std::int64_t> ids) const;
  void forward(std::span<const std::int64_t> ids);
  void head();

  const BaseModel& base_;
  Workers workers_;
  std::vector<Layer> layers_;
  std::vector<KeyValues> past_;
  std::size_t tokens_ = 0;
  std::optional<Room> room_;
  std::vector<float> logits_;
};

}  // namespace monograph::train
