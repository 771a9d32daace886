// The logits behind each token of a prompt, given one by one:
//   decoder_logits BASE ADAPTER DTYPE THREADS OUT.safetensors TOKEN...
#include <iostream>

#include "monograph/base/error.h"
#include "monograph/safetensors/writer.h"
#include "monograph/train/decoder.h"

namespace {

using namespace monograph;
using namespace monograph::train;

int run(int count, char** arguments) {
  ThreadPool pool(std::stoi(arguments[4]));
  const auto each = [&](std::size_t units, std::size_t grain, ParallelBody body) {
    pool.parallel_for(units, grain, body);
  };
  const BaseModel base(arguments[1], *find_dtype(arguments[3]));
  const LoraParameters parameters = read_parameters(Adapter::open(arguments[2]), base);
  Decoder decoder(base, parameters, {each, pool.threads()});
  std::vector<float> found;
  for (int i = 6; i < count; ++i) {
    const std::int64_t id = std::stoll(arguments[i]);
    const std::span<const float> logits = decoder.append({&id, 1});
    found.insert(found.end(), logits.begin(), logits.end());
  }
  const std::size_t tokens = static_cast<std::size_t>(count) - 6;
  const safetensors::TensorSpec spec = {
      "logits", safetensors::StoredDType::kF32, {tokens, base.config().vocabulary}};
  safetensors::Writer writer(arguments[5], safetensors::plan_file({spec}, {}));
  writer.write("logits", 0,
               {reinterpret_cast<const std::uint8_t*>(found.data()), found.size() * 4});
  writer.finish();
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 7) return 2;
  try {
    return run(count, arguments);
  } catch (const monograph::Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
