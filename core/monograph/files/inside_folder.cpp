#include "monograph/files/inside_folder.h"

#include <algorithm>
#include <system_error>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"

namespace monograph::files {
namespace {

using text::in_quotes;

namespace fs = std::filesystem;

bool is_inside(const fs::path& path, const fs::path& folder) {
  const auto [end, ignored] = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return end == folder.end();
}

}  // namespace

fs::path resolve_inside(const fs::path& folder, const std::string& name, const std::string& what) {
  std::error_code error;
  fs::path resolved = fs::canonical(folder / name, error);
  if (error) throw Error(what + ": cannot be found: " + error.message());
  if (is_inside(resolved, folder)) return resolved;
  const fs::path snapshots = folder.parent_path();
  const bool cache = snapshots.filename() == "snapshots";
  if (cache && is_inside(resolved, snapshots.parent_path() / "blobs")) return resolved;
  throw Error(what + ": a symbolic link leaves the folder, to " + in_quotes(resolved.string()));
}

}  // namespace monograph::files
