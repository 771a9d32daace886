// monograph::pack and pack_stream: documents into rows of a fixed number of tokens, by their
// lengths.
#include <cstring>
#include <span>

#include "arguments/device.h"
#include "monograph/packing/packing.h"

namespace monograph::ops {
namespace {

using Integers = std::vector<std::int64_t>;

std::span<const std::int64_t> integers_of(const char* op, const char* what, const Tensor& tensor) {
  check_given(op, what, tensor);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long, op, ": ", what, " has dtype ",
                  name_of(tensor.scalar_type()), ", wanted int64");
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", what, " is not contiguous");
  return {static_cast<const std::int64_t*>(tensor.const_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

Tensor tensor_of(const Tensor& like, const Integers& values) {
  Tensor tensor = torch::stable::new_empty(like, {static_cast<std::int64_t>(values.size())});
  if (!values.empty())
    std::memcpy(tensor.mutable_data_ptr(), values.data(), values.size() * sizeof values[0]);
  return tensor;
}

void check_limits(const char* op, std::int64_t capacity, std::int64_t max_documents) {
  STD_TORCH_CHECK(capacity >= 1 && capacity <= kLargestCapacity, op, ": capacity is ", capacity,
                  ", wanted 1 to ", kLargestCapacity);
  STD_TORCH_CHECK(max_documents >= 0, op, ": max_documents is ", max_documents,
                  ", wanted 1 or more, or 0 for any number");
}

std::int64_t limit_of(std::int64_t max_documents) {
  return max_documents == 0 ? kAnyNumber : max_documents;
}

// [documents, starts, row_offsets] of Packing.
std::vector<Tensor> pack_cpu(const Tensor& lengths, std::int64_t capacity,
                             std::int64_t max_documents, std::int64_t strategy,
                             std::int64_t overlong) {
  check_device("pack", DeviceType::CPU, {{"lengths", lengths}});
  check_limits("pack", capacity, max_documents);
  STD_TORCH_CHECK(strategy == 0 || strategy == 1, "pack: strategy is ", strategy,
                  ", wanted 0 (best fit decreasing) or 1 (first fit)");
  STD_TORCH_CHECK(overlong >= 0 && overlong <= 2, "pack: overlong is ", overlong,
                  ", wanted 0 (truncate), 1 (split) or 2 (refuse)");
  const Packing packing =
      pack(integers_of("pack", "lengths", lengths),
           {capacity, limit_of(max_documents), static_cast<PackStrategy>(strategy),
            static_cast<Overlong>(overlong)});
  return {tensor_of(lengths, packing.documents), tensor_of(lengths, packing.starts),
          tensor_of(lengths, packing.row_offsets)};
}

// So that no number of documents makes the count of rows overflow.
constexpr std::int64_t kLastRow = std::int64_t{1} << 62;

// The rows of `open` are OpenRow: number, space, documents.
PackStream stream_of(const Tensor& open, std::int64_t next_row, std::int64_t capacity,
                     std::int64_t max_documents, std::int64_t max_open) {
  STD_TORCH_CHECK(next_row >= 0 && next_row <= kLastRow, "pack_stream: next_row is ", next_row,
                  ", wanted 0 to ", kLastRow);
  check_given("pack_stream", "open", open);
  STD_TORCH_CHECK(open.dim() == 2 && open.size(1) == 3 && open.size(0) <= max_open,
                  "pack_stream: open has ", open.dim(), " dimensions and ", open.numel(),
                  " elements, wanted [rows, 3] with at most max_open=", max_open, " rows");
  PackStream stream = {capacity, limit_of(max_documents), max_open, next_row, {}};
  const auto numbers = integers_of("pack_stream", "open", open);
  for (std::size_t i = 0; i < numbers.size(); i += 3) {
    const OpenRow row = {numbers[i], numbers[i + 1], numbers[i + 2]};
    STD_TORCH_CHECK(row.row >= 0 && row.row < next_row && row.space >= 1 && row.space <= capacity &&
                        row.documents >= 0 && row.documents < stream.max_documents,
                    "pack_stream: open row ", row.row, " has space ", row.space, " and ",
                    row.documents, " documents, wanted a row that was opened and is not full");
    stream.open.push_back(row);
  }
  return stream;
}

// [row of each document, closed rows in the order of closing, open afterwards].
std::vector<Tensor> pack_stream_cpu(const Tensor& lengths, const Tensor& open,
                                    std::int64_t next_row, std::int64_t capacity,
                                    std::int64_t max_documents, std::int64_t max_open) {
  check_device("pack_stream", DeviceType::CPU, {{"lengths", lengths}, {"open", open}});
  check_limits("pack_stream", capacity, max_documents);
  STD_TORCH_CHECK(max_open >= 1, "pack_stream: max_open is ", max_open, ", wanted 1 or more");
  PackStream stream = stream_of(open, next_row, capacity, max_documents, max_open);
  Integers rows, closed, still_open;
  for (const std::int64_t length : integers_of("pack_stream", "lengths", lengths)) {
    STD_TORCH_CHECK(length >= 1 && length <= capacity, "pack_stream: document ", rows.size(),
                    " has length ", length, ", wanted 1 to ", capacity);
    rows.push_back(place(stream, length, closed));
  }
  for (const OpenRow& row : stream.open)
    still_open.insert(still_open.end(), {row.row, row.space, row.documents});
  const auto open_rows = static_cast<std::int64_t>(stream.open.size());
  return {tensor_of(lengths, rows), tensor_of(lengths, closed),
          torch::stable::reshape(tensor_of(lengths, still_open), {open_rows, 3})};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("pack", TORCH_BOX(&pack_cpu));
  m.impl("pack_stream", TORCH_BOX(&pack_stream_cpu));
}

}  // namespace monograph::ops
