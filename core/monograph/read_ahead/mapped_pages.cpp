#include "monograph/read_ahead/mapped_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

#include "monograph/base/error.h"

namespace monograph {
namespace {

// Numbers of Linux that C libraries do not all name yet: 5.14, 5.4 and, of files, 5.13.
constexpr int kPopulateRead = 22, kPageOut = 21, kDontUnmap = 4;
// The system reads no more than its read-ahead window for one call of MADV_WILLNEED; 128 KiB unless
// somebody changed it.
constexpr std::size_t kSlice = std::size_t{128} << 10;
constexpr std::size_t kPagesAtOnce = 4096;

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

struct Pages {
  std::uintptr_t begin, end;
  std::size_t bytes() const { return end - begin; }
};

Pages pages_around(const MappedBytes& range) {
  const std::uintptr_t mask = page_size() - 1;
  return {range.address & ~mask, (range.address + range.bytes + mask) & ~mask};
}

Pages pages_within(const MappedBytes& range) {
  const std::uintptr_t mask = page_size() - 1;
  const std::uintptr_t begin = (range.address + mask) & ~mask;
  return {begin, std::max(begin, (range.address + range.bytes) & ~mask)};
}

// NOLINTNEXTLINE(performance-no-int-to-ptr): the kernel's pages are numbers here
void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

std::string place_of(const MappedBytes& range) {
  return name_of_file(range.file) + ": bytes " + std::to_string(range.offset) + " to " +
         std::to_string(range.offset + range.bytes);
}

struct Found {
  std::size_t present = 0;
  bool copied = false;  // a private copy is among them, or nothing can be told
};

// Of an entry of pagemap three bits: in the page tables, swapped out, a page of a file.
Found look_at(const Pages& pages) {
  Found found;
  const int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (file < 0) return {0, true};
  std::array<std::uint64_t, kPagesAtOnce> entries{};
  for (std::uintptr_t at = pages.begin; at < pages.end;) {
    const std::size_t count = std::min((pages.end - at) / page_size(), entries.size());
    const std::size_t wanted = count * sizeof(std::uint64_t);
    const auto offset = static_cast<off_t>(at / page_size() * sizeof(std::uint64_t));
    if (pread(file, entries.data(), wanted, offset) != static_cast<ssize_t>(wanted)) {
      found.copied = true;
      break;
    }
    for (std::size_t i = 0; i < count; ++i) {
      const bool here = (entries[i] >> 63 & 1) != 0, swapped = (entries[i] >> 62 & 1) != 0;
      found.present += here ? 1 : 0;
      if ((here || swapped) && (entries[i] >> 61 & 1) == 0) found.copied = true;
    }
    at += count * page_size();
  }
  close(file);
  return found;
}

// Out of the page tables, without the copy that MADV_DONTNEED would lose of a page that somebody
// writes to after it was looked at: the entries move to an address that nobody else knows, in one
// call, and are looked at there. What is written meanwhile is copied at the old address and stays.
// Without such a call (Linux before 5.13) the pages stay too.
void take_out(const Pages& pages) {
  // The C library reads the fifth argument with this flag.
  void* const aside = mremap(pointer(pages.begin), pages.bytes(), pages.bytes(),
                             MREMAP_MAYMOVE | kDontUnmap, nullptr);
  if (aside == MAP_FAILED) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(aside);
  if (look_at({begin, begin + pages.bytes()}).copied) {
    // Written between the first look and the move. Page by page, so that only those go back.
    for (std::uintptr_t at = 0; at < pages.bytes(); at += page_size()) {
      if (!look_at({begin + at, begin + at + page_size()}).copied) continue;
      mremap(pointer(begin + at), page_size(), page_size(), MREMAP_MAYMOVE | MREMAP_FIXED,
             pointer(pages.begin + at));
    }
  }
  munmap(aside, pages.bytes());
}

}  // namespace

std::string name_of_file(int file) {
  std::array<char, 4096> name{};
  const std::string link = "/proc/self/fd/" + std::to_string(file);
  const ssize_t length = readlink(link.c_str(), name.data(), name.size());
  return length > 0 ? std::string(name.data(), static_cast<std::size_t>(length))
                    : "a file of the base";
}

void read_pages(const MappedBytes& range) {
  const Pages pages = pages_around(range);
  // Starts the reads without waiting; the pages appear in order.
  for (std::uintptr_t at = pages.begin; at < pages.end; at += kSlice)
    madvise(pointer(at), std::min(kSlice, pages.end - at), MADV_WILLNEED);
  while (madvise(pointer(pages.begin), pages.bytes(), kPopulateRead) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == EFAULT)
      throw Error(place_of(range) + " are mapped and not in the file: it was cut");
    throw Error(place_of(range) +
                " cannot be read into memory: " + std::generic_category().message(errno) +
                (errno == EINVAL ? "; wanted Linux 5.14 or later" : ""));
  }
}

// MADV_PAGEOUT does nothing to pages that other processes have mapped too, or of files that are not
// this user's. Such pages are taken out of the page tables, which loses no byte of a file, and the
// last one to do so drops them from the cache; as posix_fadvise drops what was read and not mapped.
void drop_pages(const MappedBytes& range) {
  drop_pages(range, [] {});
}

void drop_pages(const MappedBytes& range, FunctionRef<void()> looked) {
  const Pages pages = pages_within(range);
  if (pages.bytes() == 0) return;
  madvise(pointer(pages.begin), pages.bytes(), kPageOut);
  const Found left = look_at(pages);
  looked();
  if (left.present > 0 && !left.copied) take_out(pages);
  posix_fadvise(range.file, static_cast<off_t>(range.offset + (pages.begin - range.address)),
                static_cast<off_t>(pages.bytes()), POSIX_FADV_DONTNEED);
}

std::size_t held_pages(const MappedBytes& range) {
  return look_at(pages_within(range)).present * page_size();
}

void read_no_neighbours(const MappedBytes& range) {
  const Pages pages = pages_within(range);
  if (pages.bytes() > 0) madvise(pointer(pages.begin), pages.bytes(), MADV_RANDOM);
}

}  // namespace monograph
