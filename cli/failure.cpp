#include "failure.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>
#include <string_view>

#include "command.h"
#include "monograph/base/error.h"
#include "monograph/files/file_ops.h"
#include "program_name.h"

namespace monograph::cli {
namespace {

constexpr std::string_view kOutOfMemory = ": out of memory\n";

void write_all(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

// Nothing here may need memory, so neither stdio nor the name as it was called.
int report_out_of_memory() {
  write_all(program_name());
  write_all(kOutOfMemory);
  return kMemory;
}

[[noreturn]] void on_terminate() noexcept {
  bool no_memory = false;
  if (const std::exception_ptr thrown = std::current_exception()) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::bad_alloc&) {
      no_memory = true;
    } catch (...) {
    }
  } else {
    // There may not even be memory for the exception.
    void* const probe = std::malloc(64);
    no_memory = probe == nullptr;
    std::free(probe);
  }
  if (no_memory) ::_exit(report_out_of_memory());
  std::abort();
}

}  // namespace

int report(const char* what, int code) {
  std::fprintf(stderr, "%s: %s\n", program_name(), as_called(what).c_str());
  return code;
}

int report_failure() {
  try {
    throw;
  } catch (const Interrupted& stop) {
    return report(stop.what(), 128 + stop.signal());
  } catch (const files::IoError& error) {
    return report(error.what(), kIo);
  } catch (const Error& error) {
    return report(error.what(), kBadInput);
  } catch (const std::filesystem::filesystem_error& error) {
    return report(error.what(), kIo);
  } catch (const UsageError& error) {
    return report(error.what(), kUsage);
  } catch (const std::bad_alloc&) {
    return report_out_of_memory();
  } catch (const std::exception& error) {
    return report(error.what(), kInternal);
  } catch (...) {
    return report("something that is no exception was thrown", kInternal);
  }
}

void end_quietly() { std::set_terminate(on_terminate); }

}  // namespace monograph::cli
