// Whether a server applies an adapter as it was trained, or else a form that can be made of it.
#pragma once

#include <vector>

#include "monograph/serving/rules.h"

namespace monograph {

// Every rule that is broken, in the order of the rules; empty if the server applies the adapter.
// The form is made too, in memory, if the rules allow one: findings are all convertible exactly
// where ServingForm, and for llama.cpp the file, can be made. An adapter that PEFT applies as it is
// needs no form and has no finding, even if it is more than low-rank factors.
std::vector<ServingFinding> check_serving(const ServingCheck& check);

}  // namespace monograph
