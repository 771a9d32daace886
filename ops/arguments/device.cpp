#include "arguments/device.h"

#include <string>

namespace monograph::ops {
namespace {

std::string type_name(DeviceType type) {
  switch (type) {
    case DeviceType::CPU:
      return "cpu";
    case DeviceType::CUDA:
      return "cuda";
    case DeviceType::HIP:
      return "hip";
    case DeviceType::XLA:
      return "xla";
    case DeviceType::XPU:
      return "xpu";
    case DeviceType::MPS:
      return "mps";
    case DeviceType::Meta:
      return "meta";
    case DeviceType::HPU:
      return "hpu";
    case DeviceType::MTIA:
      return "mtia";
    case DeviceType::PrivateUse1:
      return "privateuseone";
    default:
      return std::string("device type ") + std::to_string(static_cast<int>(type));
  }
}

// As torch prints it: cpu, cuda:1.
std::string name_of(const torch::stable::Device& device) {
  std::string name = type_name(device.type());
  if (device.has_index()) name.append(":").append(std::to_string(device.index()));
  return name;
}

[[noreturn]] void refuse_device(const char* op, const NamedTensors& argument, std::size_t i,
                                const std::string& wanted) {
  std::string name = argument.name;
  if (argument.list) name.append("[").append(std::to_string(i)).append("]");
  refuse(op, ": ", name, " is on ", name_of(argument.first[i].device()), ", wanted ", wanted);
}

}  // namespace

void check_device(const char* op, DeviceType type, std::initializer_list<NamedTensors> arguments) {
  std::optional<torch::stable::Device> common;
  for (const NamedTensors& argument : arguments)
    for (std::size_t i = 0; i < argument.count; ++i) {
      const Tensor& tensor = argument.first[i];
      // The CPU has no index to compare.
      if (!tensor.defined() || (type == DeviceType::CPU && tensor.is_cpu())) continue;
      const torch::stable::Device device = tensor.device();
      if (device.type() != type) refuse_device(op, argument, i, type_name(type));
      if (!common) common = device;
      if (device.index() != common->index())
        refuse_device(op, argument, i, name_of(*common).append(" as the others"));
    }
}

}  // namespace monograph::ops
