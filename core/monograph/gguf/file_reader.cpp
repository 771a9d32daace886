#include "monograph/gguf/file_reader.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <string_view>
#include <vector>

#include "monograph/hash/checkpoint_hash.h"

namespace monograph::gguf {

bool is_gguf(const std::filesystem::path& path) {
  if (path.extension() == ".gguf") return true;
  std::error_code error;
  if (path.extension() == ".safetensors" || !std::filesystem::is_regular_file(path, error)) {
    return false;
  }
  std::array<char, 4> magic{};
  std::ifstream(path, std::ios::binary).read(magic.data(), magic.size());
  return std::string_view(magic.data(), magic.size()) == "GGUF";
}

std::string file_sha256(const FileReader& file, ParallelFor parallel_for,
                        FunctionRef<void(std::uint64_t)> done) {
  std::vector<HashedTensor> tensors;
  for (const TensorInfo& tensor : file.header().tensors) {
    tensors.push_back({tensor.name, info_of(tensor.type).name, tensor.shape, file.bytes(tensor)});
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const HashedTensor& a, const HashedTensor& b) { return a.name < b.name; });
  return tensors_sha256(tensors, parallel_for, done);
}

}  // namespace monograph::gguf
