#include "monograph/gguf/model_rope.h"

#include <cmath>
#include <utility>

namespace monograph::gguf {
namespace {

using json::Kind;
using json::Value;
using text::in_quotes;

// What Phi3Config takes where config.json says nothing.
constexpr std::uint64_t kPhiContext = 4096;

class RopeReader {
 public:
  RopeReader(const ConfigSettings& settings, const ModelConfig& config, double default_theta)
      : settings_(settings), config_(config) {
    const Value* parameters = settings.find("rope_parameters");
    const Value* full = parameters == nullptr ? nullptr : parameters->find("full_attention");
    const Value* global = full != nullptr ? full : parameters;
    rope_.theta = theta_of(settings, global, "rope_theta", default_theta);
    const Value* scaling = settings.find("rope_scaling");
    all_ = scaling != nullptr ? scaling : global;
    if (all_ != nullptr && !all_->is(Kind::kObject)) {
      settings.fail("rope_scaling is " + ConfigSettings::shown(all_) + ", wanted an object");
    }
  }

  Rope read() {
    const Value* type = get("rope_type") != nullptr ? get("rope_type") : get("type");
    const std::string_view name = type == nullptr ? "default" : type->as_string().value_or("");
    if (config_.is_gpt_oss() && all_ == nullptr) {
      settings_.fail("rope_parameters is missing, wanted it: transformers takes yarn here");
    }
    read_turned_part();
    if (name == "default") {
      if (config_.is_phi()) rope_.original_context = settings_.count(kOriginal, kPhiContext);
      return rope_;
    }
    if (config_.is_phi()) {
      read_longrope(name);
    } else if (name == "linear") {
      rope_.factor = settings_.positive("rope_scaling.factor", get("factor"));
      rope_.scaling = RopeScaling::kLinear;
    } else if (name == "yarn") {
      read_yarn();
    } else if (name == "llama3" && config_.architecture->name == "llama") {
      read_llama3();
    } else {
      settings_.fail("rope_type is " + in_quotes(name) + ", export to GGUF knows for " +
                     std::string(config_.architecture->name) + " default, linear, yarn" +
                     (config_.architecture->name == "llama" ? ", llama3" : ""));
    }
    return rope_;
  }

 private:
  static constexpr std::string_view kOriginal = "original_max_position_embeddings";

  const Value* get(std::string_view key) const {
    const Value* value = all_ == nullptr ? nullptr : all_->find(key);
    return value == nullptr || value->is(Kind::kNull) ? nullptr : value;
  }

  void read_turned_part() {
    rope_.dimensions = config_.head_dim;
    const Value* part = get("partial_rotary_factor");
    if (part == nullptr) part = settings_.find("partial_rotary_factor");
    if (part == nullptr) return;
    const double share = part->as_double().value_or(0);
    if (!config_.is_phi() && share != 1) {
      settings_.fail("partial_rotary_factor is " + ConfigSettings::shown(part) + ", wanted 1");
    }
    const double turned = share * static_cast<double>(config_.head_dim);
    if (!(turned >= 2) || share > 1 || std::fmod(std::floor(turned), 2) != 0) {
      settings_.fail("partial_rotary_factor is " + ConfigSettings::shown(part) +
                     ", wanted an even number of the " + std::to_string(config_.head_dim) +
                     " elements of a head");
    }
    rope_.dimensions = static_cast<std::uint64_t>(turned);
  }

  void read_original_context(std::uint64_t otherwise) {
    const Value* original = get(kOriginal);
    rope_.original_context = original == nullptr ? otherwise : original->as_unsigned().value_or(0);
    if (rope_.original_context != 0 && rope_.original_context <= UINT32_MAX) return;
    settings_.fail("rope_scaling." + std::string(kOriginal) + " is " +
                   ConfigSettings::shown(original) + ", wanted a number above 0");
  }

  void must_be(std::string_view key, double wanted) const {
    const Value* value = get(key);
    if (value == nullptr || value->as_double().value_or(0) == wanted) return;
    settings_.fail("rope_scaling." + std::string(key) + " is " + ConfigSettings::shown(value) +
                   ", wanted " + std::to_string(static_cast<int>(wanted)));
  }

  // llama.cpp has the usual numbers.
  void read_yarn() {
    rope_.scaling = RopeScaling::kYarn;
    rope_.factor = settings_.positive("rope_scaling.factor", get("factor"));
    read_original_context(config_.context);
    for (const std::string_view key : {"attention_factor", "mscale", "mscale_all_dim"}) {
      if (get(key) != nullptr) {
        settings_.fail("rope_scaling." + std::string(key) + " is set: wanted none");
      }
    }
    must_be("beta_fast", 32);
    must_be("beta_slow", 1);
    // A file of gpt-oss does not say it: it is read as OpenAI's code has it.
    const bool wanted = !config_.is_gpt_oss();
    const Value* truncated = get("truncate");
    const bool found = truncated == nullptr || truncated->as_bool().value_or(!wanted);
    if (found == wanted) return;
    settings_.fail("rope_scaling.truncate is " + ConfigSettings::shown(truncated) + ", wanted " +
                   (wanted ? "true" : "false"));
  }

  void read_llama3() {
    rope_.scaling = RopeScaling::kLlama3;
    rope_.factor = settings_.positive("rope_scaling.factor", get("factor"));
    read_original_context(0);
    rope_.low_freq_factor =
        settings_.positive("rope_scaling.low_freq_factor", get("low_freq_factor"));
    rope_.high_freq_factor =
        settings_.positive("rope_scaling.high_freq_factor", get("high_freq_factor"));
    if (rope_.high_freq_factor <= rope_.low_freq_factor) {
      settings_.fail("rope_scaling.high_freq_factor is not above low_freq_factor");
    }
  }

  // "su" and "yarn" are what earlier folders of Phi 3 call it.
  void read_longrope(std::string_view name) {
    if (name != "longrope" && name != "su" && name != "yarn") {
      settings_.fail("rope_type is " + in_quotes(name) +
                     ", export to GGUF knows for phi3 default, longrope");
    }
    rope_.scaling = RopeScaling::kLongrope;
    // transformers puts this before that of rope_scaling.
    rope_.original_context = settings_.count(kOriginal, kPhiContext);
    const Value* inside = get(kOriginal);
    if (inside != nullptr && inside->as_unsigned() != rope_.original_context) {
      settings_.fail("rope_scaling." + std::string(kOriginal) + " is " +
                     ConfigSettings::shown(inside) + ", config.json has " +
                     std::to_string(rope_.original_context));
    }
    rope_.long_factors = numbers("long_factor");
    rope_.short_factors = numbers("short_factor");
    const auto original = static_cast<double>(rope_.original_context);
    rope_.factor = get("factor") != nullptr
                       ? settings_.positive("rope_scaling.factor", get("factor"))
                       : static_cast<double>(config_.context) / original;
    rope_.attention_factor =
        get("attention_factor") != nullptr
            ? settings_.positive("rope_scaling.attention_factor", get("attention_factor"))
        : rope_.factor <= 1 ? 1
                            : std::sqrt(1 + std::log(rope_.factor) / std::log(original));
    if (!std::isfinite(rope_.attention_factor)) {
      settings_.fail(std::string(kOriginal) +
                     " is 1, wanted more: the factor of attention is "
                     "infinite");
    }
  }

  std::vector<float> numbers(std::string_view key) const {
    const Value* list = get(key);
    const std::size_t wanted = rope_.dimensions / 2;
    if (list == nullptr || !list->is(Kind::kArray) || list->items().size() != wanted) {
      const bool other = list != nullptr && list->is(Kind::kArray);
      settings_.fail("rope_scaling." + std::string(key) + " is " +
                     (other ? "a list of " + std::to_string(list->items().size())
                            : ConfigSettings::shown(list)) +
                     ", wanted a list of " + std::to_string(wanted) + " numbers");
    }
    std::vector<float> found;
    for (const Value& item : list->items()) {
      found.push_back(
          static_cast<float>(settings_.positive("rope_scaling." + std::string(key), &item)));
    }
    return found;
  }

  const ConfigSettings& settings_;
  const ModelConfig& config_;
  const Value* all_ = nullptr;
  Rope rope_;
};

}  // namespace

double theta_of(const ConfigSettings& settings, const Value* parameters, std::string_view key,
                double otherwise) {
  const Value* theta = parameters == nullptr ? nullptr : parameters->find("rope_theta");
  return theta == nullptr ? settings.number(key, otherwise)
                          : settings.positive("rope_theta", theta);
}

Rope read_rope(const ConfigSettings& settings, const ModelConfig& config, double default_theta) {
  return RopeReader(settings, config, default_theta).read();
}

}  // namespace monograph::gguf
