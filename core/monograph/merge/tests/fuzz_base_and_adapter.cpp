// libFuzzer: a base and its adapter together. The input is four texts with the byte 0x1e between
// them: header of model.safetensors, config.json, header of adapter_model.safetensors,
// adapter_config.json. Whatever they say, the check of an adapter and its conversion agree, and a
// merge is planned or refused by Error.
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "monograph/adapter/adapter.h"
#include "monograph/adapter/base_modules.h"
#include "monograph/base/error.h"
#include "monograph/gguf_adapter/gguf_lora.h"
#include "monograph/merge/plan.h"
#include "monograph/quant_methods/list_weights.h"
#include "monograph/serving/check.h"
#include "monograph/serving/form.h"
#include "monograph/serving/gguf_tensors.h"
#include "monograph/weights/weight.h"

namespace {

using namespace monograph;
namespace fs = std::filesystem;

constexpr char kBetween = 0x1e;  // a control character, which no JSON text has
constexpr std::uint64_t kMostData = 1 << 16;

void require(bool condition) {
  if (!condition) std::abort();
}

// In memory, and gone with the process.
class Folder {
 public:
  Folder() : path_(fs::path("/dev/shm") / ("monograph-fuzz-" + std::to_string(getpid()))) {
    fs::create_directories(path_ / "base");
    fs::create_directories(path_ / "adapter");
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  fs::path base() const { return path_ / "base"; }
  fs::path adapter() const { return path_ / "adapter"; }

 private:
  fs::path path_;
};

void write_text(const fs::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary)
      .write(text.data(), static_cast<std::streamsize>(text.size()));
}

// As much data behind the header as it speaks of, unless that is much.
std::uint64_t data_bytes(std::string_view header) {
  const auto json = nlohmann::json::parse(header, nullptr, /*allow_exceptions=*/false);
  std::uint64_t end = 0;
  if (!json.is_object()) return 0;
  for (const auto& entry : json) {
    if (!entry.is_object() || !entry.contains("data_offsets")) continue;
    const auto& offsets = entry["data_offsets"];
    if (offsets.is_array() && offsets.size() == 2 && offsets[1].is_number_unsigned()) {
      end = std::max(end, offsets[1].get<std::uint64_t>());
    }
  }
  return end <= kMostData ? end : 0;
}

void write_tensors(const fs::path& path, std::string_view header) {
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  bytes += header;
  bytes += std::string(data_bytes(header), '\x3c');  // a small number in every type
  write_text(path, bytes);
}

bool converts(const ServingCheck& request) {
  try {
    const ServingForm form(request);
    if (request.server == Server::kLlamaCpp) check_gguf_lora(form, *request.base);
    for (const ServedPair& pair : form.pairs()) {
      require(pair.stacked != 0 || form.left(pair).size() == pair.outputs * form.rank());
      require(pair.stacked != 0 || form.right(pair).size() == form.rank() * pair.inputs);
      for (const float value : form.left(pair)) require(std::isfinite(value));
    }
    require(form.specs().size() == 2 * form.pairs().size());
    return true;
  } catch (const Error&) {
    return false;
  }
}

void serve(const Folder& folder, const std::vector<Weight>& weights, const json::Value& config,
           const json::Value& adapter_config) {
  const BaseModules modules(weights, config);
  const safetensors::Checkpoint adapter = open_adapter_tensors(folder.adapter());
  ServingCheck request;
  request.adapter = &adapter;
  request.config = &adapter_config;
  request.config_path = "adapter_config.json";
  request.base = &modules;
  for (const Server server : {Server::kVllm, Server::kSglang, Server::kLlamaCpp, Server::kPeft}) {
    request.server = server;
    std::vector<ServingFinding> findings;
    try {
      findings = check_serving(request);
    } catch (const Error&) {
      require(!converts(request));
      continue;
    }
    bool convertible = true;
    for (const ServingFinding& finding : findings) convertible &= finding.convertible;
    // PEFT applies adapters that have no form.
    if (server != Server::kPeft || !findings.empty()) require(converts(request) == convertible);
  }
}

void merge(const Folder& folder, const std::vector<Weight>& weights, const json::Value& config) {
  const Adapter adapter = Adapter::open(folder.adapter());
  const std::array<WeightedAdapter, 1> weighted = {{{&adapter, 1.0}}};
  MergeSettings packed;
  packed.format = Format::kNf4;
  for (const MergeSettings& settings : {MergeSettings(), packed}) {
    const MergePlan plan = plan_merge(weights, config, weighted, settings);
    require(plan.weights.empty() == plan.specs().empty());
    merged_config(config, plan, settings);
  }
}

template <class Call>
void unless_refused(Call call) {
  try {
    call();
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folder folder;
  std::array<std::string_view, 4> parts;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  for (std::string_view& part : parts) {
    const std::size_t end = std::min(rest.find(kBetween), rest.size());
    part = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  write_tensors(folder.base() / "model.safetensors", parts[0]);
  write_tensors(folder.adapter() / "adapter_model.safetensors", parts[2]);
  write_text(folder.adapter() / "adapter_config.json", parts[3]);
  unless_refused([&] {
    const json::Value config = json::parse(parts[1], "config.json");
    const json::Value adapter_config = json::parse(parts[3], "adapter_config.json");
    if (!config.is(json::Kind::kObject) || !adapter_config.is(json::Kind::kObject)) return;
    const auto checkpoint = safetensors::Checkpoint::open(folder.base(), "model");
    const std::vector<Weight> weights = list_weights(checkpoint, &config);
    unless_refused([&] { serve(folder, weights, config, adapter_config); });
    unless_refused([&] { merge(folder, weights, config); });
  });
  return 0;
}
