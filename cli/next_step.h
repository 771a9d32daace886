// The last line of a command: what to do with the result.
#pragma once

#include <string>

#include "session.h"

namespace monograph::cli {

// "Next: TEXT" on stderr, after what was printed to stdout; nothing under --quiet.
void say_next(const Session& session, const std::string& text);

// A path as one word of a shell's command line.
std::string shell_word(const std::string& path);

}  // namespace monograph::cli
