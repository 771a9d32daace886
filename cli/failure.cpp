#include "failure.h"

#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>

#include "command.h"
#include "monograph/base/error.h"
#include "monograph/files/file_ops.h"
#include "program_name.h"

namespace monograph::cli {

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
    return report("out of memory", kIo);
  } catch (const std::exception& error) {
    return report(error.what(), kInternal);
  } catch (...) {
    return report("something that is no exception was thrown", kInternal);
  }
}

}  // namespace monograph::cli
