// The device of a call: current while the object lives, with torch's current stream on it.
#pragma once

#include <cstdint>
#include <memory>

namespace monograph::ops {

class CudaDevice {
 public:
  // torch's index, as Tensor::get_device_index() gives it.
  explicit CudaDevice(std::int32_t index);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  void* stream() const { return stream_; }
  // 10 * major + minor of its compute capability.
  int capability() const;
  // Whether the stream records a graph: what the host reads now is read once for all replays.
  bool captures() const;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
  std::int32_t index_;
  void* stream_;
};

}  // namespace monograph::ops
