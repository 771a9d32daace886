// The one file that is compiled for torch 2.13: the stream's own handle is not in the stable ABI
// before. It includes nothing of torch but the accelerator, so that no inline function of the ABI
// exists in two versions.
#include "cuda/device.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include <string>

#include "monograph/base/error.h"

namespace monograph::ops {
namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw Error(std::string(what) + ": " + cudaGetErrorName(error) + ", " +
                cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

struct CudaDevice::Guard {
  torch::stable::accelerator::DeviceGuard device;
};

CudaDevice::CudaDevice(std::int32_t index)
    : guard_(new Guard{torch::stable::accelerator::DeviceGuard(index)}),
      index_(index),
      stream_(torch::stable::accelerator::getCurrentStream(index).nativeHandle()) {}

CudaDevice::~CudaDevice() = default;

int CudaDevice::capability() const {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor, index_) +
         attribute(cudaDevAttrComputeCapabilityMinor, index_);
}

bool CudaDevice::captures() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream_), &status),
        "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace monograph::ops
