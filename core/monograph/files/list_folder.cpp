#include "monograph/files/list_folder.h"

#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "monograph/files/file_ops.h"

namespace monograph::files {

std::vector<std::string> list_folder(const std::filesystem::path& folder) {
  struct Closer {
    void operator()(DIR* stream) const { ::closedir(stream); }
  };
  const std::unique_ptr<DIR, Closer> stream(::opendir(folder.c_str()));
  if (stream == nullptr) throw IoError(folder, "cannot be listed", errno);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(stream.get())) {
    std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(std::move(name));
    errno = 0;
  }
  if (errno != 0) throw IoError(folder, "cannot be listed", errno);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace monograph::files
