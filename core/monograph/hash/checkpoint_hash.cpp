#include "monograph/hash/checkpoint_hash.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "monograph/hash/sha256.h"
#include "monograph/text/json_document.h"

namespace monograph {

std::string checkpoint_sha256(const safetensors::Checkpoint& checkpoint, ParallelFor parallel_for,
                              FunctionRef<void(std::uint64_t)> done) {
  std::vector<HashedTensor> tensors;
  for (const safetensors::LocatedTensor& tensor : checkpoint.tensors()) {
    const safetensors::TensorEntry& entry = *tensor.entry;
    tensors.push_back({entry.name, name_of(entry.dtype), entry.shape, tensor.bytes()});
  }
  return tensors_sha256(tensors, parallel_for, done);
}

std::string tensors_sha256(std::span<const HashedTensor> tensors, ParallelFor parallel_for,
                           FunctionRef<void(std::uint64_t)> done) {
  // Longest first, each thread takes the next: one large embedding does not wait for the end.
  std::vector<std::size_t> order(tensors.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return tensors[a].bytes.size() > tensors[b].bytes.size();
  });
  std::vector<std::string> hashes(tensors.size());
  std::atomic<std::size_t> next = 0;
  parallel_for(tensors.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (; begin < end; ++begin) {
      const std::size_t i = order[next++];
      Sha256 hash;
      hash.add(tensors[i].bytes);
      hashes[i] = hash.hex();
      done(tensors[i].bytes.size());
    }
  });
  Sha256 whole;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const HashedTensor& tensor = tensors[i];
    std::string line = json::quote(tensor.name) + " " + std::string(tensor.dtype) + " [";
    for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
      line += (d == 0 ? "" : ", ") + std::to_string(tensor.shape[d]);
    }
    whole.add(line + "] " + hashes[i] + "\n");
  }
  return whole.hex();
}

}  // namespace monograph
