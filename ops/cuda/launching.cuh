// For the .cu files alone: a launch by format, and its error by name.
#pragma once

#include <cuda_runtime_api.h>

#include <limits>
#include <string>

#include "cuda/launch.h"
#include "monograph/base/error.h"
#include "monograph/formats/all.h"

namespace monograph::gpu {

inline cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream); }

inline unsigned grid_size(const char* kernel, std::size_t blocks) {
  if (blocks > static_cast<std::size_t>(std::numeric_limits<int>::max()))
    throw Error(std::string(kernel) + ": a launch of " + std::to_string(blocks) +
                " blocks, at most 2^31 - 1 wanted");
  return static_cast<unsigned>(blocks);
}

// Behind every launch: an error of its arguments. Those of running kernels come later, by torch.
inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  throw Error(std::string(kernel) + ": the launch failed: " + cudaGetErrorName(error) + ", " +
              cudaGetErrorString(error));
}

// Calls run.operator()<F>() for the format whose kernels serve this one.
template <class Run, class... Fs>
bool by_format(FormatList<Fs...>, Format format, const Run& run) {
  return ((format == Fs::kFormat ? (run.template operator()<Fs>(), true) : false) || ...);
}
template <class Run>
void by_format(const char* kernel, Format format, const Run& run) {
  const FormatInfo* const info = find_format(format);
  if (info == nullptr || !by_format(PackedFormats{}, info->kernels, run))
    throw Error(std::string(kernel) + ": no kernel for format " +
                (info == nullptr ? "0" : info->name) + " on CUDA");
}

}  // namespace monograph::gpu
