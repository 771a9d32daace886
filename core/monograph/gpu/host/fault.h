// What the harness says of a kernel that would be wrong on a GPU.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace monograph::gpu::host {

enum class FaultKind : std::uint8_t {
  kMissingBarrier,       // shared memory changes hands between two threads without a barrier
  kCopyNotWaitedFor,     // an asynchronous copy's bytes are used before they have arrived
  kDivergentBarrier,     // some threads wait for others that never come, or come to another place
  kDivergentWarp,        // the same for an operation of a warp
  kMisaligned,           // an address that is no multiple of the access
  kUninitialisedShared,  // shared memory that nobody has written in this block
  kSharedOutOfBounds,
  kGlobalOutOfBounds,
  kReadOnly,  // a write to an input
};
const char* name_of(FaultKind kind);

class KernelFault : public std::runtime_error {
 public:
  KernelFault(FaultKind kind, const std::string& what)
      : std::runtime_error(std::string(name_of(kind)) + ": " + what), kind_(kind) {}
  FaultKind kind() const { return kind_; }

 private:
  FaultKind kind_;
};

}  // namespace monograph::gpu::host
