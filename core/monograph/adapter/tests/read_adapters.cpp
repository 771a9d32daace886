// What the library makes of its input, for tests in Python. A word says what to do:
//   fields            the table of LoraConfig's fields: NAME USE
//   match             lines PATTERN<tab>MODULE -> 0, 1 or "error"
//   adapter FOLDER    one line per LoRA: MODULE RANK SCALE (exact, hexadecimal)
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>

#include "monograph/adapter/adapter.h"
#include "monograph/base/error.h"

int main(int argc, char** argv) {
  using namespace monograph;
  const std::string what = argc > 1 ? argv[1] : "";
  try {
    if (what == "fields") {
      for (const AdapterField& field : adapter_fields()) {
        std::cout << field.name << ' ' << static_cast<int>(field.use) << '\n';
      }
      return 0;
    }
    if (what == "adapter" && argc > 2) {
      const Adapter adapter = Adapter::open(argv[2]);
      for (const auto& [module, lora] : adapter.low_rank()) {
        std::printf("%s %llu %a\n", module.c_str(), static_cast<unsigned long long>(lora.rank),
                    lora.scale);
      }
      return 0;
    }
  } catch (const Error& error) {
    std::cerr << error.what() << '\n';
    return 3;
  }
  for (std::string line; what == "match" && std::getline(std::cin, line);) {
    const std::size_t tab = line.find('\t');
    try {
      const ModulePattern pattern(line.substr(0, tab), "match");
      std::cout << pattern.matches(line.substr(tab + 1)) << '\n';
    } catch (const Error&) {
      std::cout << "error\n";
    }
  }
  return 0;
}
