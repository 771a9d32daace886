// Writes a safetensors file, which appears complete or not at all, and reads it back.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <span>

#include "monograph/safetensors/checkpoint.h"
#include "monograph/safetensors/writer.h"

int main(int count, char** arguments) try {
  using namespace monograph::safetensors;
  const char* path = count > 1 ? arguments[1] : "model.safetensors";
  const float weight[] = {1, 2, 3, 4, 5, 6};
  Writer writer(path, plan_file({{"weight", StoredDType::kF32, {2, 3}}}, /*metadata=*/{}));
  writer.write("weight", 0, {reinterpret_cast<const std::uint8_t*>(weight), sizeof weight});
  writer.finish();

  const Checkpoint checkpoint = Checkpoint::open(path);
  for (const LocatedTensor& tensor : checkpoint.tensors()) {
    const std::span<const std::uint8_t> bytes = tensor.bytes();  // of the mapped file
    float last = 0;
    std::memcpy(&last, &bytes[bytes.size() - sizeof last], sizeof last);
    std::printf("%s %s %zu elements, the last is %g\n", tensor.entry->name.c_str(),
                name_of(tensor.entry->dtype).data(), bytes.size() / sizeof last, last);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
