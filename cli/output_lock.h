// A folder that one run at a time writes into: the lock that `monograph train` takes there.
#pragma once

#include <filesystem>

namespace monograph::cli {

class OutputLock {
 public:
  // Makes the folder. Throws Error if another run holds it, IoError if the lock cannot be made. A
  // file system without locks is used without one.
  explicit OutputLock(const std::filesystem::path& folder);
  ~OutputLock();
  OutputLock(const OutputLock&) = delete;
  OutputLock& operator=(const OutputLock&) = delete;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
};

}  // namespace monograph::cli
