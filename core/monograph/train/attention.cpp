#include "monograph/train/attention.h"

#include "monograph/kernels/rotary/angles.h"

namespace monograph::train {
namespace {

HeadsView heads_of(const Activations& x, std::size_t size) {
  return {x.data(), static_cast<std::ptrdiff_t>(x.cols()), static_cast<std::ptrdiff_t>(size)};
}
MutableHeadsView heads_of(Activations& x, std::size_t size) {
  return {x.data(), static_cast<std::ptrdiff_t>(x.cols()), static_cast<std::ptrdiff_t>(size)};
}
HeadRows rows_of(const Activations& x, std::size_t size) { return {x.data(), x.cols(), size}; }

}  // namespace

Angles::Angles(const BaseModel& model, const Batch& batch, const Workers& workers) {
  const std::size_t size = model.config().head_size;
  for (const RopeScaling& rope : model.config().ropes) {
    Table& table = tables.emplace_back(Table{Activations(model.dtype(), batch.length, size),
                                             Activations(model.dtype(), batch.length, size)});
    const std::vector<float> frequencies = rotary_frequencies(rope, size);
    rotary_angles({model.dtype(), batch.positions.data(), batch.length, frequencies.data(),
                   size / 2, 1.0, table.cos.data(), table.sin.data()},
                  workers.parallel_for);
  }
}

AttentionKept::AttentionKept(const BaseModel& model, std::size_t tokens)
    : query(model.dtype(), tokens, model.config().query_width()),
      key(model.dtype(), tokens, model.config().key_width()),
      value(model.dtype(), tokens, model.config().key_width()),
      turned_query(model.dtype(), tokens, model.config().query_width()),
      turned_key(model.dtype(), tokens, model.config().key_width()),
      out(model.dtype(), tokens, model.config().query_width()),
      lse(model.config().heads * tokens) {}

Attention::Attention(const BaseModel& model, std::size_t layer, const Batch& batch,
                     const Angles& angles, KeyValues* past)
    : model_(model), layer_(layer), batch_(batch), angles_(angles), past_(past), past_offsets_{} {
  if (past != nullptr)
    past_offsets_[1] = static_cast<std::int32_t>(past->tokens() + batch.tokens());
}

RotaryProblem Attention::turns(std::size_t heads, const std::vector<float>& gain) const {
  const ModelConfig& config = model_.config();
  const std::size_t size = config.head_size;
  const Angles::Table& table = angles_.tables[config.rope_of[layer_]];
  return {model_.dtype(),
          batch_.tokens(),
          heads,
          size,
          size,
          false,
          table.cos.data(),
          table.sin.data(),
          batch_.length,
          gain.empty() ? nullptr : gain.data(),
          config.eps,
          config.norm_rounding};
}

AttentionProblem Attention::problem() const {
  const ModelConfig& config = model_.config();
  const std::int32_t* const lengths =
      batch_.key_lengths.empty() ? nullptr : batch_.key_lengths.data();
  const std::int32_t* const queries = batch_.offsets.data();
  const std::int32_t* const keys = past_ == nullptr ? queries : past_offsets_.data();
  return {model_.dtype(),
          batch_.tokens(),
          past_ == nullptr ? batch_.tokens() : static_cast<std::size_t>(past_offsets_[1]),
          config.heads,
          config.kv_heads,
          config.head_size,
          config.head_size,
          true,
          config.windows[layer_],
          static_cast<float>(config.attention_scale),
          0,
          nullptr,
          {batch_.offsets.size() - 1, queries, keys, lengths}};
}

void Attention::forward(AttentionKept& kept, const Workers& workers) const {
  const ModelConfig& config = model_.config();
  const std::size_t size = config.head_size;
  const BaseLayer& layer = model_.layers()[layer_];
  rotary(
      {turns(config.heads, layer.query_norm), rows_of(kept.query, size), kept.turned_query.data()},
      workers.parallel_for);
  rotary({turns(config.kv_heads, layer.key_norm), rows_of(kept.key, size), kept.turned_key.data()},
         workers.parallel_for);
  if (past_ != nullptr) past_->append(kept.turned_key, kept.value);
  const Activations& query = kept.turned_query;
  const Activations& key = past_ == nullptr ? kept.turned_key : past_->keys();
  const Activations& value = past_ == nullptr ? kept.value : past_->values();
  varlen_attention({problem(), heads_of(query, size), heads_of(key, size), heads_of(value, size),
                    heads_of(kept.out, size), kept.lse.data()},
                   workers.parallel_for, workers.threads);
}

void Attention::backward(const AttentionKept& kept, const Activations& dout, Activations& dquery,
                         Activations& dkey, Activations& dvalue, const Workers& workers) const {
  const ModelConfig& config = model_.config();
  const std::size_t size = config.head_size;
  const BaseLayer& layer = model_.layers()[layer_];
  Activations turned_query(dquery.dtype(), dquery.rows(), dquery.cols());
  Activations turned_key(dkey.dtype(), dkey.rows(), dkey.cols());
  varlen_attention_backward(
      {problem(), heads_of(kept.turned_query, size), heads_of(kept.turned_key, size),
       heads_of(kept.value, size), heads_of(kept.out, size), heads_of(dout, size), kept.lse.data(),
       heads_of(turned_query, size), heads_of(turned_key, size), heads_of(dvalue, size), nullptr},
      workers.parallel_for, workers.threads);
  rotary_backward({turns(config.heads, layer.query_norm), rows_of(turned_query, size),
                   rows_of(kept.query, size), dquery.data(), nullptr},
                  workers.parallel_for);
  rotary_backward({turns(config.kv_heads, layer.key_norm), rows_of(turned_key, size),
                   rows_of(kept.key, size), dkey.data(), nullptr},
                  workers.parallel_for);
}

}  // namespace monograph::train
