#include "monograph/serving/gguf_names.h"

#include "monograph/serving/layers.h"

namespace monograph {

const gguf::Architecture* find_gguf_architecture(const BaseModules& base) {
  return gguf::find_architecture(base.model_type());
}

std::optional<GgufPlace> gguf_place(const BaseModules& base, std::string_view stored,
                                    std::string_view projection) {
  const gguf::Architecture* architecture = find_gguf_architecture(base);
  if (architecture == nullptr) return std::nullopt;
  const std::optional<std::string> name = gguf::matrix_name(stored, projection);
  if (!name) return std::nullopt;
  GgufPlace place{*name + ".weight"};
  if (!architecture->rotates_neighbours) return place;
  const std::uint64_t heads = base.number("num_attention_heads");
  if (name->ends_with(".attn_q")) place.permuted_heads = heads;
  if (name->ends_with(".attn_k")) {
    const std::uint64_t of_keys = base.number("num_key_value_heads");
    place.permuted_heads = of_keys == 0 ? heads : of_keys;
  }
  return place;
}

std::optional<GgufPlace> gguf_place(const BaseModules& base, const PlacedFactors& placed) {
  if (placed.experts == 0) {
    const std::optional<ExpertName> expert = parse_expert_name(placed.matrix.stored + ".weight");
    return gguf_place(base, placed.matrix.stored, expert ? expert->projection : "");
  }
  const ExpertPart part = parts_of(base, placed).front();
  const std::optional<std::string> single = single_expert(base, placed, 0, part, Server::kLlamaCpp);
  if (!single) return std::nullopt;
  return gguf_place(base, *single, part.projection);
}

}  // namespace monograph
