// seeded_dropout on a GPU: the mask is a function of seed, stream and position, and the seed is
// read on the device. out = x / (1 - probability) where it is kept, else x * 0 / (1 - probability),
// so that NaN and infinities stay seen; rounded to fp32 and then to T.
#pragma once

#include "monograph/gpu/prims.h"
#include "monograph/kernels/seeded_dropout/philox.h"

namespace monograph::gpu {

inline constexpr unsigned kDropoutThreads = 128;

template <class T>
struct DropoutJob {
  const T* x;
  T* out;
  std::size_t count;
  const std::int64_t* seed;  // one number, on the device
  std::uint64_t stream;
  std::uint64_t keep_below;  // monograph::keep_below(probability)
  float keep;                // 1 - probability
};
constexpr std::size_t dropout_blocks(std::size_t count) {
  return (count + 4 * kDropoutThreads - 1) / (4 * kDropoutThreads);
}

template <class T>
MONOGRAPH_KERNEL(kDropoutThreads)
seeded_dropout_kernel(DropoutJob<T> job) {
  const std::size_t four = std::size_t{block_index_x()} * kDropoutThreads + thread_index();
  if (four * 4 >= job.count) return;
  const PhiloxWords words =
      mask_words(static_cast<std::uint64_t>(read(job.seed)), job.stream, four);
  MONOGRAPH_UNROLL
  for (unsigned k = 0; k < 4; ++k) {
    const std::size_t i = four * 4 + k;
    if (i >= job.count) continue;
    const float x = widen(read(job.x + i));
    // torch rounds the product with the mask to T, which changes nothing.
    const float kept = words.word[k] < job.keep_below ? x : mul(x, 0.0f);
    write(job.out + i, round_to<T>(div(kept, job.keep)));
  }
}

}  // namespace monograph::gpu
