#include "cpu/spill_registry.h"

#include <map>
#include <memory>
#include <unordered_map>

#include "monograph/base/error.h"
#include "monograph/base/process_wide.h"
#include "monograph/files/spill_file.h"

namespace monograph::ops {
namespace {

std::int64_t as_number(std::uint64_t size) { return static_cast<std::int64_t>(size); }

struct File {
  std::unique_ptr<files::SpillFile> file;
  std::int64_t writes = 0, bytes_written = 0, reads = 0, bytes_read = 0, alive = 0, bytes_alive = 0;
};

struct Kept {
  std::shared_ptr<File> file;
  files::SpillFile::Extent extent;
  int references = 1;
};

struct State {
  std::map<std::int64_t, std::shared_ptr<File>> files;
  std::unordered_map<std::int64_t, Kept> kept;
  std::int64_t next_file = 1, next_ticket = 1;

  std::shared_ptr<File> find(std::int64_t file) const {
    if (file == 0 && !files.empty()) return files.rbegin()->second;
    const auto found = files.find(file);
    if (found == files.end())
      throw Error(file == 0 ? std::string("no spill file is open, wanted one: "
                                          "monograph.memory.offload.spill_folder(folder) opens it")
                            : "spill file " + std::to_string(file) + " is not open");
    return found->second;
  }
};

using Spilled = ProcessWide<State>;

}  // namespace

SpillRegistry spill_registry() { return {}; }

std::int64_t SpillRegistry::open(const std::string& folder) {
  auto made = std::make_shared<File>();
  made->file = std::make_unique<files::SpillFile>(folder);
  const auto state = Spilled::hold();
  const std::int64_t number = state->next_file++;
  state->files.emplace(number, std::move(made));
  return number;
}

void SpillRegistry::close(std::int64_t file) {
  std::shared_ptr<File> closed;  // removed from disk outside of the lock
  const auto state = Spilled::hold();
  if (file == 0) throw Error("spill file 0 cannot be closed by that number");
  closed = state->find(file);
  closed->file->remove_name();
  state->files.erase(file);
}

std::vector<std::int64_t> SpillRegistry::counts(std::int64_t file) {
  const auto state = Spilled::hold();
  const File& f = *state->find(file);
  return {f.writes, f.bytes_written, f.reads, f.bytes_read, f.alive, f.bytes_alive};
}

std::int64_t SpillRegistry::write(std::int64_t file, std::span<const std::uint8_t> bytes) {
  Kept kept;
  {
    const auto state = Spilled::hold();
    kept.file = state->find(file);
  }
  kept.extent = kept.file->file->write(bytes);
  const auto state = Spilled::hold();
  const std::int64_t ticket = state->next_ticket++;
  File& counted = *kept.file;
  counted.writes += 1;
  counted.bytes_written += as_number(bytes.size());
  counted.alive += 1;
  counted.bytes_alive += as_number(bytes.size());
  state->kept.emplace(ticket, std::move(kept));
  return ticket;
}

std::int64_t SpillRegistry::begin(std::int64_t ticket) {
  const auto state = Spilled::hold();
  const auto found = state->kept.find(ticket);
  if (found == state->kept.end())
    throw Error("the handle has ticket " + std::to_string(ticket) +
                ", and nothing is kept under it: its offload is over, or it is a copy");
  found->second.references += 1;
  found->second.file->file->will_read(found->second.extent);
  return as_number(found->second.extent.size_bytes);
}

bool SpillRegistry::same(std::int64_t ticket, std::span<const std::uint8_t> bytes) {
  files::SpillFile::Extent extent;
  {
    const auto state = Spilled::hold();
    const auto found = state->kept.find(ticket);
    if (found == state->kept.end())
      throw Error("nothing is kept under ticket " + std::to_string(ticket));
    extent = found->second.extent;
  }
  return files::SpillFile::is(extent, bytes);
}

void SpillRegistry::read(std::int64_t ticket, std::span<std::uint8_t> into) {
  begin(ticket);  // it stays while it is read
  std::shared_ptr<File> file;
  files::SpillFile::Extent extent;
  {
    const auto state = Spilled::hold();
    const Kept& kept = state->kept.at(ticket);
    file = kept.file;
    extent = kept.extent;
  }
  try {
    file->file->read(extent, into);
  } catch (...) {
    drop(ticket);
    throw;
  }
  {
    const auto state = Spilled::hold();
    file->reads += 1;
    file->bytes_read += as_number(into.size());
  }
  drop(ticket);
}

void SpillRegistry::drop(std::int64_t ticket) noexcept {
  std::shared_ptr<File> file;
  files::SpillFile::Extent extent;
  {
    const auto state = Spilled::hold();
    const auto found = state->kept.find(ticket);
    if (found == state->kept.end() || --found->second.references > 0) return;
    file = std::move(found->second.file);
    extent = found->second.extent;
    file->alive -= 1;
    file->bytes_alive -= as_number(extent.size_bytes);
    state->kept.erase(found);
  }
  file->file->release(extent);
}

}  // namespace monograph::ops
