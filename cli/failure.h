// Errors as text and exit codes.
#pragma once

namespace monograph::cli {

// Writes the line to stderr and returns the code.
int report(const char* what, int code);

// The same for the exception that is being handled: call it inside `catch (...)`.
int report_failure();

}  // namespace monograph::cli
