// monograph adapter: an adapter beside its base, for servers.
#include "adapter.h"

#include <array>

#include "command.h"

namespace monograph::cli {
namespace {

constexpr std::array kSubcommands = {&kAdapterCheck, &kAdapterConvert};

}  // namespace

const Command kAdapter = {
    "adapter",
    "check an adapter for a server, or write the form that the server applies",
    "A PEFT adapter that is served beside its base. Servers read less of it than PEFT does, and "
    "what they do not read they mostly pass over in silence.",
    "monograph adapter check llama my-lora --for vllm\n"
    "monograph adapter convert llama my-lora --for vllm --out my-lora-vllm",
    nullptr,
    kSubcommands,
};

}  // namespace monograph::cli
