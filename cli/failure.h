// Errors as text and exit codes.
#pragma once

namespace monograph::cli {

// Writes the line to stderr and returns the code.
int report(const char* what, int code);

// The same for the exception that is being handled: call it inside `catch (...)`.
int report_failure();

// From now on what ends the process by force is told in one line: without memory nothing can be
// thrown from where nobody catches, or while something is thrown. Allocates nothing.
void end_quietly();

}  // namespace monograph::cli
