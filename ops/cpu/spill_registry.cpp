#include "cpu/spill_registry.h"

#include "monograph/base/error.h"

namespace monograph::ops {
namespace {

std::int64_t as_number(std::uint64_t size) { return static_cast<std::int64_t>(size); }

}  // namespace

SpillRegistry& spill_registry() {
  static auto* registry = new SpillRegistry;
  return *registry;
}

std::int64_t SpillRegistry::open(const std::string& folder) {
  auto made = std::make_shared<File>();
  made->file = std::make_unique<files::SpillFile>(folder);
  const std::scoped_lock lock(mutex_);
  const std::int64_t number = next_file_++;
  files_.emplace(number, std::move(made));
  return number;
}

// Holds the lock already.
std::shared_ptr<SpillRegistry::File> SpillRegistry::find(std::int64_t file) {
  if (file == 0 && !files_.empty()) return files_.rbegin()->second;
  const auto found = files_.find(file);
  if (found == files_.end())
    throw Error(file == 0 ? std::string("no spill file is open, wanted one: "
                                        "monograph.offload.spill_folder(folder) opens it")
                          : "spill file " + std::to_string(file) + " is not open");
  return found->second;
}

void SpillRegistry::close(std::int64_t file) {
  std::shared_ptr<File> closed;  // removed from disk outside of the lock
  const std::scoped_lock lock(mutex_);
  if (file == 0) throw Error("spill file 0 cannot be closed by that number");
  closed = find(file);
  closed->file->remove_name();
  files_.erase(file);
}

std::vector<std::int64_t> SpillRegistry::counts(std::int64_t file) {
  const std::scoped_lock lock(mutex_);
  const File& f = *find(file);
  return {f.writes, f.bytes_written, f.reads, f.bytes_read, f.alive, f.bytes_alive};
}

std::int64_t SpillRegistry::write(std::int64_t file, std::span<const std::uint8_t> bytes) {
  Kept kept;
  {
    const std::scoped_lock lock(mutex_);
    kept.file = find(file);
  }
  kept.extent = kept.file->file->write(bytes);
  const std::scoped_lock lock(mutex_);
  const std::int64_t ticket = next_ticket_++;
  File& counted = *kept.file;
  counted.writes += 1;
  counted.bytes_written += as_number(bytes.size());
  counted.alive += 1;
  counted.bytes_alive += as_number(bytes.size());
  kept_.emplace(ticket, std::move(kept));
  return ticket;
}

std::int64_t SpillRegistry::begin(std::int64_t ticket) {
  const std::scoped_lock lock(mutex_);
  const auto found = kept_.find(ticket);
  if (found == kept_.end())
    throw Error("the handle has ticket " + std::to_string(ticket) +
                ", and nothing is kept under it: its offload is over, or it is a copy");
  found->second.references += 1;
  found->second.file->file->will_read(found->second.extent);
  return as_number(found->second.extent.size_bytes);
}

bool SpillRegistry::same(std::int64_t ticket, std::span<const std::uint8_t> bytes) {
  files::SpillFile::Extent extent;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = kept_.find(ticket);
    if (found == kept_.end()) throw Error("nothing is kept under ticket " + std::to_string(ticket));
    extent = found->second.extent;
  }
  return files::SpillFile::is(extent, bytes);
}

void SpillRegistry::read(std::int64_t ticket, std::span<std::uint8_t> into) {
  begin(ticket);  // it stays while it is read
  std::shared_ptr<File> file;
  files::SpillFile::Extent extent;
  {
    const std::scoped_lock lock(mutex_);
    const Kept& kept = kept_.at(ticket);
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
    const std::scoped_lock lock(mutex_);
    file->reads += 1;
    file->bytes_read += as_number(into.size());
  }
  drop(ticket);
}

void SpillRegistry::drop(std::int64_t ticket) noexcept {
  std::shared_ptr<File> file;
  files::SpillFile::Extent extent;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = kept_.find(ticket);
    if (found == kept_.end() || --found->second.references > 0) return;
    file = std::move(found->second.file);
    extent = found->second.extent;
    file->alive -= 1;
    file->bytes_alive -= as_number(extent.size_bytes);
    kept_.erase(found);
  }
  file->file->release(extent);
}

}  // namespace monograph::ops
