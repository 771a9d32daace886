// The name that this program is called by. The wheel `monograph-tool` has the same program under
// its own name, so that it can be installed beside the wheel `monograph`.
#pragma once

#include <string>

namespace monograph::cli {

// Of argv[0], before anything else.
void take_program_name(const char* called);
// "monograph-tool" if started by that name, else "monograph".
const char* program_name();
// Whether it was started as monograph-tool, which has no Python package beside it.
bool is_tool_alone();
// The text with every "monograph COMMAND" under the name that the program was called by.
std::string as_called(std::string text);

}  // namespace monograph::cli
