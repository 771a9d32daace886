#include "monograph/gguf/description.h"

#include <string>

#include "monograph/base/error.h"
#include "monograph/gguf/import.h"
#include "monograph/gguf/import_config.h"
#include "monograph/gguf/import_keys.h"
#include "monograph/gguf/import_tokenizer.h"

namespace monograph::gguf {
namespace {

using json::Value;

Value tensor_json(const ImportedTensor& tensor, const FileReader& file) {
  Value shape = Value::array();
  for (const std::uint64_t size : tensor.shape) shape.append(whole(size));
  const std::uint64_t row_bytes = size_bytes(tensor.info->type, tensor.shape.back());
  Value one = Value::object();
  one.append_member("name", Value::string(tensor.name));
  one.append_member("type", Value::string(info_of(tensor.info->type).name));
  one.append_member("shape", std::move(shape));
  one.append_member("offset", whole(file.header().data_offset_bytes + tensor.info->offset_bytes +
                                    tensor.first_row * row_bytes));
  one.append_member("bytes", whole(rows_of(tensor) * row_bytes));
  if (tensor.permuted_head_rows != 0) {
    one.append_member("head_rows", whole(tensor.permuted_head_rows));
  }
  if (tensor.subtract_one) one.append_member("subtract_one", Value::boolean(true));
  return one;
}

}  // namespace

Value describe(const FileReader& file) {
  Value all = Value::object();
  all.set("config", import_config(file, DType::kBFloat16));
  try {
    ImportedTokenizer found = import_tokenizer(file.header(), file.path().string());
    all.set("tokenizer", std::move(found.tokenizer));
    all.set("tokenizer_config", std::move(found.config));
    if (found.generation) all.set("generation_config", std::move(*found.generation));
  } catch (const Error& error) {
    all.set("no_tokenizer", Value::string(error.what()));
  }
  Value& tensors = all.set("tensors", Value::array());
  const ImportPlan plan = plan_import(file);
  for (const ImportedTensor& tensor : plan.tensors) tensors.append(tensor_json(tensor, file));
  return all;
}

}  // namespace monograph::gguf
