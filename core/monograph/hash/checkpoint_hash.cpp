#include "monograph/hash/checkpoint_hash.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "monograph/hash/sha256.h"
#include "monograph/text/json_document.h"

namespace monograph {

using safetensors::LocatedTensor;

std::string checkpoint_sha256(const safetensors::Checkpoint& checkpoint, ParallelFor parallel_for,
                              FunctionRef<void(std::uint64_t)> done) {
  // Longest first, each thread takes the next: one large embedding does not wait for the end.
  const std::vector<LocatedTensor>& tensors = checkpoint.tensors();
  std::vector<std::size_t> order(tensors.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return tensors[a].entry->size_bytes > tensors[b].entry->size_bytes;
  });
  std::vector<std::string> hashes(tensors.size());
  std::atomic<std::size_t> next = 0;
  parallel_for(tensors.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (; begin < end; ++begin) {
      const std::size_t i = order[next++];
      Sha256 hash;
      hash.add(tensors[i].bytes());
      hashes[i] = hash.hex();
      done(tensors[i].entry->size_bytes);
    }
  });
  Sha256 whole;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const safetensors::TensorEntry& entry = *tensors[i].entry;
    std::string line = json::quote(entry.name) + " " + std::string(name_of(entry.dtype)) + " [";
    for (std::size_t d = 0; d < entry.shape.size(); ++d) {
      line += (d == 0 ? "" : ", ") + std::to_string(entry.shape[d]);
    }
    whole.add(line + "] " + hashes[i] + "\n");
  }
  return whole.hex();
}

}  // namespace monograph
