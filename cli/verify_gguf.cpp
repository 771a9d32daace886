#include <atomic>
#include <cmath>
#include <cstdio>

#include "gguf_file.h"
#include "monograph/cpu/parallel.h"
#include "monograph/gguf/decode_blocks.h"
#include "monograph/gguf/file_reader.h"
#include "next_step.h"
#include "table.h"

namespace monograph::cli {
namespace {

struct Finding {
  std::string tensor;
  std::uint64_t count = 0, first = 0;  // values, and the element of the first
};

// Values of a tensor that are NaN or infinite.
Finding scan(const gguf::FileReader& file, const gguf::TensorInfo& tensor) {
  constexpr std::size_t kPiece = 4096;  // blocks
  const gguf::TensorTypeInfo& type = gguf::info_of(tensor.type);
  const auto bytes = file.bytes(tensor);
  const std::size_t blocks = bytes.size() / type.block_bytes;
  std::vector<float> values(kPiece * type.block_elements);
  Finding finding;
  finding.tensor = tensor.name;
  for (std::size_t begin = 0; begin < blocks; begin += kPiece) {
    const std::size_t count = std::min(kPiece, blocks - begin);
    gguf::decode(tensor.type, bytes.data() + begin * type.block_bytes, count, values.data());
    for (std::size_t i = 0; i < count * type.block_elements; ++i) {
      if (std::isfinite(values[i])) continue;
      if (finding.count++ == 0) finding.first = begin * type.block_elements + i;
    }
  }
  return finding;
}

std::vector<Finding> scan_all(const gguf::FileReader& file, int jobs, const Session& session) {
  const std::vector<gguf::TensorInfo>& tensors = file.header().tensors;
  std::uint64_t total = 0;
  for (const gguf::TensorInfo& tensor : tensors) total += tensor.size_bytes;
  const auto progress = session.progress("scan", total);
  std::vector<Finding> findings(tensors.size());
  ThreadPool pool(threads_of(jobs));
  pool.parallel_for(tensors.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      findings[i] = scan(file, tensors[i]);
      progress(tensors[i].size_bytes);
    }
  });
  std::erase_if(findings, [](const Finding& finding) { return finding.count == 0; });
  return findings;
}

}  // namespace

int verify_gguf(const std::string& path, int jobs, bool scan, bool json, const Session& session) {
  const gguf::FileReader file(path);
  const std::vector<Finding> findings =
      scan ? scan_all(file, jobs, session) : std::vector<Finding>();
  const std::size_t tensors = file.header().tensors.size();
  if (json) {
    const auto count = [](std::uint64_t n) {
      return json::Value::number(static_cast<std::int64_t>(n));
    };
    json::Value value;
    value.set("schema_version", count(1));
    value.set("path", json::Value::string(path));
    value.set("files", count(1));
    value.set("tensors", count(tensors));
    json::Value& list = value.set("findings", json::Value::array());
    for (const Finding& finding : findings) {
      json::Value& one = list.append(json::Value::object());
      one.set("weight", json::Value::string(finding.tensor));
      one.set("what", json::Value::string("not finite"));
      one.set("count", count(finding.count));
      one.set("first", count(finding.first));
    }
    std::fputs(json::dump(value).c_str(), stdout);
    return findings.empty() ? kOk : kFinding;
  }
  Table table({"tensor", "what", ">count", ">first"});
  for (const Finding& finding : findings) {
    table.add({printable(finding.tensor), "not finite", std::to_string(finding.count),
               std::to_string(finding.first)});
  }
  if (!findings.empty()) std::fputs(table.text().c_str(), stdout);
  std::printf("%s: %zu tensors; %zu finding%s\n", printable(path).c_str(), tensors, findings.size(),
              findings.size() == 1 ? "" : "s");
  if (findings.empty()) {
    say_next_of_gguf(file, session);
    return kOk;
  }
  say_next(session,
           "fetch the file again from where it came, then monograph verify " + shell_word(path));
  return kFinding;
}

}  // namespace monograph::cli
