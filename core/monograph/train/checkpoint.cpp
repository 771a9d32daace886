#include "monograph/train/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>

#include "monograph/base/error.h"
#include "monograph/files/atomic_file.h"
#include "monograph/files/mapped_file.h"
#include "monograph/files/staged_folder.h"
#include "monograph/safetensors/checkpoint.h"
#include "monograph/safetensors/writer.h"

namespace monograph::train {
namespace {

namespace fs = std::filesystem;
using json::Value;

constexpr const char* kOptimizer = "optimizer.safetensors";
constexpr const char* kState = "trainer_state.json";

// A part of the flat vectors under the name that PEFT has for it.
struct Part {
  std::string name;
  std::size_t begin;
  std::vector<std::uint64_t> shape;

  std::size_t size() const { return shape[0] * shape[1]; }
};

std::vector<Part> parts_of(const LoraParameters& parameters) {
  std::vector<Part> parts;
  for (const LoraPlace& place : parameters.places) {
    const std::string name = "base_model.model." + place.module + ".lora_";
    parts.push_back({name + "A.default.weight", place.a, {place.rank, place.inputs}});
    parts.push_back({name + "B.default.weight", place.b, {place.outputs, place.rank}});
  }
  return parts;
}

template <class Parameters>
auto vectors_of(Parameters& parameters) {
  return std::map<std::string, decltype(&parameters.values)>{
      {"flat.", &parameters.values},
      {"exp_avg.", &parameters.exp_avg},
      {"exp_avg_sq.", &parameters.exp_avg_sq}};
}

void write_optimizer(const LoraParameters& parameters, const fs::path& path) {
  const std::vector<Part> parts = parts_of(parameters);
  std::vector<safetensors::TensorSpec> specs = {{"steps", safetensors::StoredDType::kF32, {}}};
  for (const auto& [prefix, vector] : vectors_of(parameters))
    for (const Part& part : parts)
      specs.push_back({prefix + part.name, safetensors::StoredDType::kF32, part.shape});
  safetensors::Writer writer(path, safetensors::plan_file(specs, {}));
  const auto write = [&](const std::string& name, const float* values, std::size_t count) {
    writer.write(name, 0, {reinterpret_cast<const std::uint8_t*>(values), count * sizeof(float)});
  };
  write("steps", &parameters.steps, 1);
  for (const auto& [prefix, vector] : vectors_of(parameters))
    for (const Part& part : parts) write(prefix + part.name, &(*vector)[part.begin], part.size());
  writer.finish();
}

void read_optimizer(const fs::path& path, LoraParameters& parameters) {
  const safetensors::Checkpoint file = safetensors::Checkpoint::open(path);
  const std::vector<Part> parts = parts_of(parameters);
  const auto read = [&](const std::string& name, const std::vector<std::uint64_t>& shape, float* to,
                        std::size_t count) {
    const safetensors::LocatedTensor* const tensor = file.find(name);
    if (tensor == nullptr || tensor->entry->dtype != safetensors::StoredDType::kF32 ||
        tensor->entry->shape != shape)
      throw Error(path.string() + ": has no " + name + " of the shape that this run has");
    std::memcpy(to, tensor->bytes().data(), count * sizeof(float));
  };
  const std::size_t wanted = 3 * parts.size() + 1;
  if (file.tensors().size() != wanted)
    throw Error(path.string() + ": has " + std::to_string(file.tensors().size()) +
                " tensors, wanted the " + std::to_string(wanted) + " of this run");
  read("steps", {}, &parameters.steps, 1);
  for (const auto& [prefix, vector] : vectors_of(parameters))
    for (const Part& part : parts)
      read(prefix + part.name, part.shape, &(*vector)[part.begin], part.size());
}

std::optional<std::size_t> number_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  constexpr std::string_view kPrefix = "checkpoint-";
  std::size_t number = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* const begin = name.data() + kPrefix.size();
  const auto [end, wrong] = std::from_chars(begin, name.data() + name.size(), number);
  const bool whole = wrong == std::errc() && end == name.data() + name.size();
  return whole ? std::optional(number) : std::nullopt;
}

std::map<std::size_t, fs::path> checkpoints_in(const fs::path& output_dir) {
  std::map<std::size_t, fs::path> found;
  if (!fs::is_directory(output_dir)) return found;
  for (const fs::directory_entry& entry : fs::directory_iterator(output_dir))
    if (const auto number = number_of(entry.path()); number && entry.is_directory())
      found[*number] = entry.path();
  return found;
}

}  // namespace

void write_checkpoint(const LoraParameters& parameters, const AdapterDescription& description,
                      const Progress& progress, const RunIdentity& identity,
                      const fs::path& folder) {
  files::StagedFolder staged(folder, files::Existing::kReplace);
  write_adapter(parameters, description, staged.path());
  write_optimizer(parameters, staged.path() / kOptimizer);
  const auto count = [](std::size_t n) { return Value::number(static_cast<std::int64_t>(n)); };
  Value state = Value::object();
  state.set("step", count(progress.step));
  state.set("best_loss", Value());
  state.set("best_step", Value());
  state.set("evaluations_without_best", count(0));
  state.set("losses_too_high", count(0));
  state.set("skipped", count(progress.skipped));
  state.set("skipped_in_a_row", count(progress.skipped_in_a_row));
  state.set("order", identity.order);
  state.set("base_sha256", Value::string(identity.base_sha256));
  state.set("identity", identity.keys);
  state.set("launch", Value::string(""));
  files::write_file(staged.path() / kState, json::dump(state));
  staged.commit();
}

ReadCheckpoint read_checkpoint(const fs::path& folder, const RunIdentity& identity,
                               LoraParameters& parameters) {
  for (const char* name : {kState, kOptimizer})
    if (!fs::is_regular_file(folder / name))
      throw Error("resume_from_checkpoint: " + folder.string() + " has no " + name +
                  "; wanted a folder checkpoint-N");
  const fs::path path = folder / kState;
  const files::MappedFile file(path);
  const std::span<const std::uint8_t> bytes = file.bytes();
  const Value state =
      json::parse({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path.string());
  ReadCheckpoint found;
  found.told = compare_runs(state, identity, folder.string());
  const auto count = [&](const char* name) {
    const Value* const value = state.find(name);
    const std::optional<std::uint64_t> written = value ? value->as_unsigned() : std::nullopt;
    if (!written)
      throw Error(path.string() + ": " + name + " is " +
                  (value ? json::dump_line(*value) : "missing") + ", wanted a count");
    return static_cast<std::size_t>(*written);
  };
  found.progress = {count("step"), count("skipped"), count("skipped_in_a_row")};
  read_optimizer(folder / kOptimizer, parameters);
  return found;
}

std::optional<LastCheckpoint> last_checkpoint(const fs::path& output_dir) {
  const std::map<std::size_t, fs::path> found = checkpoints_in(output_dir);
  if (found.empty()) return std::nullopt;
  return LastCheckpoint{found.rbegin()->first, found.rbegin()->second};
}

void keep_last_checkpoints(const fs::path& output_dir, std::size_t limit) {
  const std::map<std::size_t, fs::path> found = checkpoints_in(output_dir);
  std::size_t left = found.size();
  for (const auto& [number, folder] : found)
    if (left-- > limit) fs::remove_all(folder);
}

}  // namespace monograph::train
