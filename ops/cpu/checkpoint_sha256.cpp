// monograph::checkpoint_sha256: the hash of a checkpoint, or GGUF file, that `monograph inspect
// --hash` prints, as the 32 bytes it is.
#include <string>

#include "arguments/device.h"
#include "arguments/folder_name.h"
#include "monograph/base/error.h"
#include "monograph/gguf/file_reader.h"
#include "monograph/hash/checkpoint_hash.h"

namespace monograph::ops {
namespace {

std::vector<std::int64_t> checkpoint_sha256_cpu(const Tensor& folder) {
  constexpr const char* kOp = "checkpoint_sha256";
  const std::string name = folder_name(kOp, folder);
  std::string hex;
  try {
    const auto done = [](std::uint64_t) {};
    hex = gguf::is_gguf(name)
              ? gguf::file_sha256(gguf::FileReader(name), torch_parallel_for, done)
              : checkpoint_sha256(safetensors::Checkpoint::open(name), torch_parallel_for, done);
  } catch (const Error& error) {
    refuse(kOp, ": ", error.what());
  }
  std::vector<std::int64_t> bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CompositeExplicitAutograd, m) {
  m.impl("checkpoint_sha256", TORCH_BOX(&checkpoint_sha256_cpu));
}

}  // namespace monograph::ops
