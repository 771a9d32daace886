// Where the tensors of a call are: on one device, and named when they are not.
#pragma once

#include <initializer_list>
#include <optional>

#include "stable.h"

namespace monograph::ops {

using torch::headeronly::DeviceType;

// An argument under its name in the schema: a tensor, one that may be missing, or a list.
struct NamedTensors {
  NamedTensors(const char* argument, const Tensor& tensor) : name(argument), first(&tensor) {}
  NamedTensors(const char* argument, const std::optional<Tensor>& tensor)
      : name(argument), first(tensor ? &*tensor : nullptr), count(tensor ? 1 : 0) {}
  NamedTensors(const char* argument, const std::vector<Tensor>& tensors)
      : name(argument), first(tensors.data()), count(tensors.size()), list(true) {}

  const char* name;
  const Tensor* first;
  std::size_t count = 1;
  bool list = false;
};

// All on one device of the type that a kernel is for. Comes before every other check: those take it
// for granted. The dispatcher picks a kernel by any one of the tensors, so the others may be
// elsewhere. None is left to `check_given`.
void check_device(const char* op, DeviceType type, std::initializer_list<NamedTensors> arguments);

}  // namespace monograph::ops
