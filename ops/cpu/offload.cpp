// monograph::offload, reload and wait: bytes of host memory to a spill file and back, as functional
// operators. A handle is a tensor of two numbers, int64: a ticket and the size in bytes. What it
// stands for lives as long as the handle's memory, so that whoever keeps a handle, a graph or
// autograd, keeps the bytes, and nobody else has to give them back.
#include <string>

#include "arguments/device.h"
#include "arguments/folder_name.h"
#include "cpu/spill_registry.h"
#include "monograph/base/error.h"

namespace monograph::ops {
namespace {

// Two numbers in memory of their own; the ticket goes with them.
Tensor handle_of(const Tensor& like, std::int64_t ticket, std::int64_t size_bytes) {
  auto* numbers = new std::int64_t[2]{ticket, size_bytes};
  const std::int64_t sizes[] = {2}, strides[] = {1};
  try {
    // The ticket is not read from the memory: a graph may use that again once nobody reads it.
    return torch::stable::from_blob(numbers, sizes, strides, like.device(), ScalarType::Long,
                                    [ticket](void* data) {
                                      spill_registry().drop(ticket);
                                      delete[] static_cast<std::int64_t*>(data);
                                    });
  } catch (...) {
    delete[] numbers;
    throw;
  }
}

std::int64_t ticket_of(const char* op, const Tensor& handle) {
  check_given(op, "handle", handle);
  STD_TORCH_CHECK(handle.scalar_type() == ScalarType::Long && handle.dim() == 1 &&
                      handle.numel() == 2 && handle.is_contiguous(),
                  op, ": handle is not one of monograph::offload, wanted int64 [2]");
  return static_cast<const std::int64_t*>(handle.const_data_ptr())[0];
}

// Calls `body`; what core throws gets the operator's name.
template <class Body>
auto named(const char* op, Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    refuse(op, ": ", error.what());
  }
}

Tensor offload_cpu(const Tensor& x, std::int64_t file, std::int64_t /*slot*/) {
  constexpr const char* kOp = "offload";
  check_device(kOp, DeviceType::CPU, {{"x", x}});
  check_given(kOp, "x", x);
  STD_TORCH_CHECK(x.is_contiguous(), kOp, ": x is not contiguous");
  const std::size_t size =
      static_cast<std::size_t>(x.numel()) * static_cast<std::size_t>(x.element_size());
  const auto* data = static_cast<const std::uint8_t*>(x.const_data_ptr());
  const std::int64_t ticket = named(kOp, [&] {
    return spill_registry().write(file, {data, size});
  });
  try {
    return handle_of(x, ticket, static_cast<std::int64_t>(size));
  } catch (...) {
    spill_registry().drop(ticket);
    throw;
  }
}

Tensor reload_cpu(const Tensor& handle, const Tensor& after) {
  constexpr const char* kOp = "reload";
  check_device(kOp, DeviceType::CPU, {{"handle", handle}, {"after", after}});
  const std::int64_t ticket = ticket_of(kOp, handle);
  const std::int64_t size = named(kOp, [&] { return spill_registry().begin(ticket); });
  try {
    return handle_of(handle, ticket, size);
  } catch (...) {
    spill_registry().drop(ticket);
    throw;
  }
}

Tensor wait_cpu(const Tensor& handle, const Tensor& after, const std::vector<std::int64_t>& shape,
                ScalarType dtype) {
  constexpr const char* kOp = "wait";
  check_device(kOp, DeviceType::CPU, {{"handle", handle}, {"after", after}});
  const std::int64_t ticket = ticket_of(kOp, handle);
  for (const std::int64_t size : shape)
    STD_TORCH_CHECK(size >= 0, kOp, ": shape has the negative dimension ", size);
  Tensor found = empty(kOp, handle, shape, dtype);
  const std::size_t size =
      static_cast<std::size_t>(found.numel()) * static_cast<std::size_t>(found.element_size());
  auto* data = static_cast<std::uint8_t*>(found.mutable_data_ptr());
  named(kOp, [&] {
    spill_registry().read(ticket, {data, size});
    return 0;
  });
  return found;
}

// Whether these bytes are, by size and checksum, what the handle stands for.
bool spill_same(const Tensor& handle, const Tensor& bytes) {
  constexpr const char* kOp = "spill_same";
  check_device(kOp, DeviceType::CPU, {{"handle", handle}, {"bytes", bytes}});
  const std::int64_t ticket = ticket_of(kOp, handle);
  check_given(kOp, "bytes", bytes);
  STD_TORCH_CHECK(bytes.is_contiguous(), kOp, ": bytes is not contiguous");
  const auto* data = static_cast<const std::uint8_t*>(bytes.const_data_ptr());
  const std::size_t size =
      static_cast<std::size_t>(bytes.numel()) * static_cast<std::size_t>(bytes.element_size());
  return named(kOp, [&] { return spill_registry().same(ticket, {data, size}); });
}

std::int64_t spill_open(const Tensor& folder) {
  constexpr const char* kOp = "spill_open";
  const std::string name = folder_name(kOp, folder);
  return named(kOp, [&] { return spill_registry().open(name); });
}

void spill_close(std::int64_t file) {
  named("spill_close", [&] {
    spill_registry().close(file);
    return 0;
  });
}

// [writes, bytes written, reads, bytes read, handles alive, their bytes] of a file since it was
// opened.
std::vector<std::int64_t> spill_counts(std::int64_t file) {
  return named("spill_counts", [&] { return spill_registry().counts(file); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("offload", TORCH_BOX(&offload_cpu));
  m.impl("reload", TORCH_BOX(&reload_cpu));
  m.impl("wait", TORCH_BOX(&wait_cpu));
}
// They have no tensor to choose a backend by, or may be called without one: then they say so.
STABLE_TORCH_LIBRARY_IMPL(monograph, CompositeExplicitAutograd, m) {
  m.impl("spill_open", TORCH_BOX(&spill_open));
  m.impl("spill_same", TORCH_BOX(&spill_same));
  m.impl("spill_close", TORCH_BOX(&spill_close));
  m.impl("spill_counts", TORCH_BOX(&spill_counts));
}

}  // namespace monograph::ops
