// Keys that the native trainer does without, and other names of those that it reads.
#pragma once

#include <string>

namespace monograph::train {

// The name of a key that has several.
std::string first_name(const std::string& key);
// Whether the trainer does without a key as long as it asks for nothing: null, false, 0, "", [],
// {}.
bool may_ask_for_nothing(const std::string& key);
// Why a key changes nothing, whatever it says; nullptr for others.
const char* reason_to_ignore(const std::string& key);

}  // namespace monograph::train
