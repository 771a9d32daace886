// A file that appears under its name complete and on disk, or not at all.
//
// The bytes go to a temporary next to the target, ".NAME.partial", which is synced and then renamed
// over the target; last the folder is synced. The temporary is locked while its writer lives, so
// one that a killed process left behind is known and removed by the next writer of the same target,
// while two writers at once are an error. Names are resolved once: a symbolic link that changes
// while a file is written leads nowhere else.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "monograph/files/file_ops.h"

namespace monograph::files {

class AtomicFile {
 public:
  // Opens the temporary. Permissions are those of an existing target, else 0666 less the umask.
  // Throws Error if the target is one of `inputs` (under any name: the files it is made from are
  // mapped and must not change) or is not a regular file. A symbolic link is replaced, not
  // followed. `ops` must outlive the object.
  AtomicFile(std::filesystem::path target, std::span<const FileId> inputs = {},
             FileOps& ops = system_file_ops());
  // Removes the temporary unless the file was renamed into place.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Reserves disk space, so that a full disk is noticed before hours of work. File systems that
  // cannot do it are forgiven.
  void allocate(std::uint64_t size_bytes);
  // Thread safe for ranges that do not overlap.
  void write_at(std::uint64_t offset_bytes, std::span<const std::uint8_t> bytes);
  // All bytes are on disk when it returns.
  void sync();
  // After sync. The change of the folder is on disk only after sync_folder().
  void rename_into_place();
  void sync_folder();

  const std::filesystem::path& target() const { return target_; }

 private:
  [[noreturn]] void fail(const std::string& what, int code) const;
  std::optional<mode_t> check_target(std::span<const FileId> inputs) const;
  void resolve();
  void open_temporary(mode_t mode);
  bool remove_stale_temporary();
  void set_mode(mode_t mode);
  void discard() noexcept;

  FileOps& ops_;
  std::filesystem::path target_;                     // as it was given
  std::filesystem::path folder_, name_, temporary_;  // resolved: what is checked, opened, renamed
  int fd_ = -1;
  bool temporary_exists_ = false;
};

// The whole of a small file at once.
void write_file(const std::filesystem::path& target, std::string_view content,
                FileOps& ops = system_file_ops());

}  // namespace monograph::files
