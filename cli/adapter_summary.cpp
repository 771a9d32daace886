#include "adapter_summary.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <map>
#include <optional>

#include "monograph/adapter/tensor_key.h"
#include "monograph/base/error.h"
#include "table.h"

namespace monograph::cli {
namespace {

struct LoraModule {
  const Weight* a = nullptr;  // [rank, in]
  const Weight* b = nullptr;  // [out, rank]
};

struct Norms {
  std::uint64_t rank = 0, experts = 1;
  double scale = 0, a = 0, b = 0, change = 0;  // Frobenius; change = scale * |B A|
};

std::vector<double> as_doubles(const Weight& weight) {
  std::vector<float> floats(weight.elements);
  read_elements(weight, 0, weight.elements, DType::kFloat32, floats.data());
  return {floats.begin(), floats.end()};
}

double norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double x : values) sum += x * x;
  return std::sqrt(sum);
}

// The products of all pairs of `count` vectors, of which element i of vector v is
// values[v * step + i * stride].
std::vector<double> gram(const double* values, std::size_t count, std::size_t length,
                         std::size_t step, std::size_t stride) {
  std::vector<double> out(count * count);
  for (std::size_t i = 0; i < length; ++i) {
    for (std::size_t v = 0; v < count; ++v) {
      const double x = values[v * step + i * stride];
      for (std::size_t w = 0; w < count; ++w)
        out[v * count + w] += x * values[w * step + i * stride];
    }
  }
  return out;
}

// The alpha of a module: that of the first key of alpha_pattern which is the end of its name, as
// PEFT looks it up. PEFT's keys are regular expressions; those from a file are not run here, and
// with one that is more than a name the answer is NaN.
double alpha_of(const json::Value& config, const std::string& module) {
  const json::Value* rows = config.find("alpha_pattern");
  if (rows != nullptr) {
    for (const json::Member& row : rows->members()) {
      const bool name = std::all_of(row.key.begin(), row.key.end(), [](unsigned char c) {
        return std::isalnum(c) != 0 || c == '_' || c == '.';
      });
      if (!name) return NAN;
      if (module == row.key || module.ends_with("." + row.key)) {
        return row.value.as_double().value_or(NAN);
      }
    }
  }
  const json::Value* alpha = config.find("lora_alpha");
  return alpha == nullptr ? NAN : alpha->as_double().value_or(NAN);
}

// The rank of a parameter of several experts, whose factors have `found` rows: r of the config.
// With patterns the names of parameters would be needed, which an adapter does not have.
std::optional<std::uint64_t> rank_of_parameter(const json::Value& config, const std::string& module,
                                               std::uint64_t found) {
  const json::Value* targets = config.find("target_parameters");
  const json::Value* r = config.find("r");
  const json::Value* pattern = config.find("rank_pattern");
  if (targets == nullptr || targets->items().empty() || r == nullptr) return std::nullopt;
  if (module.find(".experts") == std::string::npos) return std::nullopt;
  if (pattern != nullptr && !pattern->members().empty()) return std::nullopt;
  const std::uint64_t rank = r->as_unsigned().value_or(0);
  if (rank == 0 || found == rank || found % rank != 0) return std::nullopt;
  return rank;
}

Norms norms_of(const json::Value& config, const std::string& module, const LoraModule& lora) {
  Norms norms;
  if (lora.a->shape.size() != 2 || lora.b->shape.size() != 2 ||
      lora.a->shape[0] != lora.b->shape[1] || !lora.a->is_readable() || !lora.b->is_readable()) {
    throw Error(lora.a->parts[0].tensor.file->path().string() + ": module " + printable(module) +
                ": lora_A " + shape_text(lora.a->shape) + " and lora_B " +
                shape_text(lora.b->shape) + " do not fit");
  }
  norms.rank = lora.a->shape[0];
  if (const auto rank = rank_of_parameter(config, module, norms.rank)) {
    norms.experts = norms.rank / *rank;
    norms.rank = *rank;
  }
  const json::Value* rs = config.find("use_rslora");
  const bool root = rs != nullptr && rs->as_bool().value_or(false);
  const auto rank = static_cast<double>(norms.rank);
  norms.scale = norms.rank == 0 ? 0 : alpha_of(config, module) / (root ? std::sqrt(rank) : rank);
  const std::vector<double> a = as_doubles(*lora.a), b = as_doubles(*lora.b);
  norms.a = norm(a);
  norms.b = norm(b);
  // |B A|^2 = sum of (B^T B) * (A A^T), element by element: rank x rank instead of out x in.
  // Those of an expert lie together in A, those of a rank in B.
  const std::size_t in = lora.a->shape[1], out = lora.b->shape[0], experts = norms.experts;
  double square = 0;
  for (std::size_t e = 0; e < experts; ++e) {
    const auto of_a = gram(a.data() + e * norms.rank * in, norms.rank, in, in, 1);
    const auto of_b = gram(b.data() + e, norms.rank, out, experts, norms.rank * experts);
    for (std::size_t i = 0; i < of_a.size(); ++i) square += of_a[i] * of_b[i];
  }
  norms.change = norms.scale * std::sqrt(std::max(square, 0.0));
  return norms;
}

std::map<std::string, LoraModule> modules_of(const Model& model) {
  std::map<std::string, LoraModule> modules;
  const auto stem = [](const std::string& name, std::string_view part) {
    const auto at = name.find(part);
    return at == std::string::npos ? std::string() : name.substr(0, at);
  };
  for (const Weight& weight : model.weights) {
    if (const auto name = stem(weight.name, ".lora_A"); !name.empty()) modules[name].a = &weight;
    if (const auto name = stem(weight.name, ".lora_B"); !name.empty()) modules[name].b = &weight;
  }
  std::erase_if(modules, [](const auto& row) { return !row.second.a || !row.second.b; });
  return modules;
}

// What people ask of an adapter first.
constexpr std::array<std::string_view, 12> kSettings = {"base_model_name_or_path",
                                                        "peft_type",
                                                        "r",
                                                        "lora_alpha",
                                                        "use_rslora",
                                                        "use_dora",
                                                        "rank_pattern",
                                                        "alpha_pattern",
                                                        "target_modules",
                                                        "target_parameters",
                                                        "modules_to_save",
                                                        "bias"};

json::Value finite_or_null(double value) {
  return std::isfinite(value) ? json::Value::number(value) : json::Value();
}

std::string module_text(const std::string& name) {
  return printable(
      std::string_view(name).substr(name.starts_with(kAdapterPrefix) ? kAdapterPrefix.size() : 0));
}

}  // namespace

json::Value adapter_json(const Model& model) {
  const json::Value config = read_json(model.folder / "adapter_config.json");
  json::Value value = json::Value::object();
  for (const std::string_view key : kSettings) {
    if (const json::Value* found = config.find(key)) value.set(key, *found);
  }
  json::Value& modules = value.set("modules", json::Value::array());
  for (const auto& [name, lora] : modules_of(model)) {
    const Norms norms = norms_of(config, name, lora);
    json::Value& row = modules.append(json::Value::object());
    row.set("module", json::Value::string(name));
    row.set("rank", json::Value::number(static_cast<std::int64_t>(norms.rank)));
    if (norms.experts != 1) {
      row.set("experts", json::Value::number(static_cast<std::int64_t>(norms.experts)));
    }
    row.set("scale", finite_or_null(norms.scale));
    row.set("norm_a", json::Value::number(norms.a));
    row.set("norm_b", json::Value::number(norms.b));
    row.set("norm_change", finite_or_null(norms.change));
  }
  return value;
}

std::string adapter_text(const Model& model, bool markdown) {
  const json::Value config = read_json(model.folder / "adapter_config.json");
  Table settings({"setting", "value"});
  for (const std::string_view key : kSettings) {
    const json::Value* found = config.find(key);
    if (found == nullptr || found->is(json::Kind::kNull)) continue;
    settings.add({std::string(key), printable(json::dump_line(*found))});
  }
  Table table({"module", ">rank", ">scale", ">|A|", ">|B|", ">scale * |B A|"});
  for (const auto& [name, lora] : modules_of(model)) {
    const Norms norms = norms_of(config, name, lora);
    table.add({module_text(name), std::to_string(norms.rank), fixed_text(norms.scale, 3),
               fixed_text(norms.a, 4), fixed_text(norms.b, 4), fixed_text(norms.change, 4)});
  }
  if (markdown) return settings.markdown() + "\n" + table.markdown();
  return settings.text() + "\n" + table.text();
}

}  // namespace monograph::cli
