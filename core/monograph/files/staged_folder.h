// A folder of files that appears under its name complete and on disk, or not at all.
//
// The files go to ".NAME.partial/new" next to the target. commit() syncs that folder and gives it
// the name of the target in one rename; a folder that is replaced is exchanged with the new one in
// one step and then removed. ".NAME.partial" is locked while its owner lives and holds a marker, so
// what a killed process left behind is known and removed by the next run for the same target.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "monograph/files/file_ops.h"

namespace monograph::files {

enum class Existing : std::uint8_t {
  kRefuse,   // only an empty folder may stand at the target
  kReplace,  // a checkpoint may: a folder with config.json or a .safetensors file
};

class StagedFolder {
 public:
  // Throws Error if the target is not a folder, holds something that `existing` does not allow, or
  // holds, is or lies in one of `input_folders`; IoError if another process writes it. `ops` must
  // outlive the object.
  StagedFolder(const std::filesystem::path& target, Existing existing,
               std::span<const std::filesystem::path> input_folders = {},
               FileOps& ops = system_file_ops());
  // Removes everything unless commit() returned.
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  // What the constructor says of the target, but writes nothing: for a dry run.
  static void check_target(const std::filesystem::path& target, Existing existing,
                           std::span<const std::filesystem::path> input_folders);

  // Where the files are to be written, each synced by its writer (Writer, write_file).
  const std::filesystem::path& path() const { return contents_; }
  const std::filesystem::path& target() const { return target_; }
  // After every file was written. On an error before the rename the old state stands.
  void commit();

 private:
  [[noreturn]] void fail(const std::string& what, int code) const;
  void take_staging();
  bool lock_staging();
  void sync(const std::filesystem::path& folder, const char* what) const;
  bool discard() noexcept;

  FileOps& ops_;
  Existing existing_;
  std::filesystem::path target_, parent_, staging_, contents_;
  int lock_ = -1;
};

}  // namespace monograph::files
