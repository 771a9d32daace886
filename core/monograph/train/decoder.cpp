#include "monograph/train/decoder.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/kernels/linear/linear.h"
#include "monograph/train/norm.h"

namespace monograph::train {
namespace {

// What a call computes at once: its activations need no more memory, however long the prompt.
constexpr std::size_t kMostAtOnce = 512;

}  // namespace

Decoder::Room::Room(const BaseModel& base, std::size_t tokens)
    : h(base.dtype(), tokens, base.config().width),
      next(base.dtype(), tokens, base.config().width),
      kept(base, tokens) {}

Decoder::Decoder(const BaseModel& base, const LoraParameters& parameters, const Workers& workers)
    : base_(base), workers_(workers), logits_(base.config().vocabulary) {
  for (std::size_t i = 0; i < base.config().layers; ++i) {
    layers_.emplace_back(base, parameters, i);
    layers_.back().round_factors(parameters.values, workers);
    past_.emplace_back(base.dtype(), base.config().key_width());
  }
}

std::span<const float> Decoder::append(std::span<const std::int64_t> ids) {
  check(ids);
  for (std::size_t begin = 0; begin < ids.size(); begin += kMostAtOnce)
    forward(ids.subspan(begin, std::min(kMostAtOnce, ids.size() - begin)));
  head();
  return logits_;
}

void Decoder::forget() {
  for (KeyValues& past : past_) past.forget();
  tokens_ = 0;
}

void Decoder::check(std::span<const std::int64_t> ids) const {
  const ModelConfig& config = base_.config();
  if (ids.empty()) throw Error("there is no token, wanted one or more");
  for (const std::int64_t id : ids)
    if (id < 0 || static_cast<std::size_t>(id) >= config.vocabulary)
      throw Error("token " + std::to_string(id) + ": wanted 0 to " +
                  std::to_string(config.vocabulary - 1) + ", the vocabulary of the base");
  if (config.positions == 0)
    throw Error("config.json: max_position_embeddings is missing, wanted the most tokens");
  if (ids.size() > config.positions - tokens_)
    throw Error(std::to_string(tokens_ + ids.size()) + " tokens, wanted " +
                std::to_string(config.positions) + " at most, max_position_embeddings of the base");
}

void Decoder::forward(std::span<const std::int64_t> ids) {
  Batch batch;
  batch.rows = 1;
  batch.length = ids.size();
  batch.ids.assign(ids.begin(), ids.end());
  batch.offsets = {0, static_cast<std::int32_t>(ids.size())};
  for (std::size_t i = 0; i < ids.size(); ++i)
    batch.positions.push_back(static_cast<std::int64_t>(tokens_ + i));
  if (!room_ || room_->h.rows() != ids.size()) room_.emplace(base_, ids.size());
  const Angles angles(base_, batch, workers_);
  base_.embed(batch.ids, room_->h.data());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    layers_[i].forward(room_->h, batch, angles, room_->kept, &room_->next, {}, workers_, &past_[i]);
    std::swap(room_->h, room_->next);
  }
  tokens_ += ids.size();
}

// Of the last token of the room.
void Decoder::head() {
  const Activations& h = room_->h;
  const DType dtype = base_.dtype();
  const std::size_t row = h.cols() * size_bytes(dtype);
  Activations last(dtype, 1, h.cols()), normed(dtype, 1, h.cols());
  Activations logits(dtype, 1, logits_.size());
  std::memcpy(last.data(), static_cast<const std::byte*>(h.data()) + (h.rows() - 1) * row, row);
  normalise(base_.config(), last, nullptr, base_.final_norm(), nullptr, normed, workers_);
  const LinearOutput output = {base_.head(), {}, nullptr, logits.out()};
  linear(dtype, normed.in(), {&output, 1}, workers_.parallel_for);
  with_type(dtype, [&]<class T>() {
    const T* const from = static_cast<const T*>(logits.data());
    for (std::size_t i = 0; i < logits_.size(); ++i) logits_[i] = to_float(from[i]);
  });
}

}  // namespace monograph::train
