// Checkpoints that break one rule each, made on demand: for the unit tests, and for the tests of
// the command line through write_hostile_files.
#pragma once

#include <filesystem>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace monograph::safetensors {

struct HostileFile {
  std::string path;     // relative to the folder of the case
  std::string content;  // or, for a link, what it points to
  bool is_link = false;
};

struct HostileCase {
  std::string name;
  std::string rule;  // occurs in the message of the error
  std::string open;  // what to open, relative to the folder of the case
  std::function<std::vector<HostileFile>()> make;
};

// How GoogleTest shows a case.
inline void PrintTo(const HostileCase& hostile, std::ostream* out) { *out << hostile.name; }

// A broken header or broken data in model.safetensors.
std::vector<HostileCase> hostile_headers();
// A broken model.safetensors.index.json, or shards that disagree with it.
std::vector<HostileCase> hostile_indexes();
// A good file whose tensors are no good weights:
// core/monograph/quant_methods/tests/hostile_weights.cpp.
std::vector<HostileCase> hostile_weights();

// Makes the files of a case in `folder`, which must exist.
void make_case(const HostileCase& hostile, const std::filesystem::path& folder);

// A file with this JSON and so many zero bytes of data.
std::string file_bytes(const std::string& json, std::size_t data_bytes);

}  // namespace monograph::safetensors
