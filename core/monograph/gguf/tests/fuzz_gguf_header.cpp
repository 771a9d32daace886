// libFuzzer: any bytes as a GGUF file. What is accepted has every tensor inside the file, and its
// first blocks decode; its tokenizer is imported or refused.
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "monograph/base/error.h"
#include "monograph/gguf/decode_blocks.h"
#include "monograph/gguf/file_header.h"
#include "monograph/gguf/import_tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace monograph;
  try {
    const gguf::FileHeader header = gguf::parse_file_header({data, size}, "fuzz");
    for (const gguf::PairView& pair : header.pairs) {
      if (pair.key.empty() || (pair.whole() && !pair.number())) std::abort();
    }
    for (const gguf::TensorInfo& tensor : header.tensors) {
      const std::uint64_t begin = header.data_offset_bytes + tensor.offset_bytes;
      if (begin + tensor.size_bytes > size || tensor.size_bytes == 0) std::abort();
      const gguf::TensorTypeInfo& type = gguf::info_of(tensor.type);
      std::vector<float> values(type.block_elements);
      gguf::decode(tensor.type, data + begin, 1, values.data());
    }
    gguf::import_tokenizer(header, "fuzz");
  } catch (const Error&) {
  }
  return 0;
}
