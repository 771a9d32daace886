// Makes every hostile checkpoint in a folder of its own below the folder given, and prints for each
// its name, what to open and a part of the error that must come, separated by tabs: input for the
// tests of the command line.
#include <filesystem>
#include <iostream>

#include "monograph/safetensors/tests/hostile_files.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: write_hostile_files FOLDER\n";
    return 2;
  }
  using namespace monograph::safetensors;
  const std::filesystem::path root = argv[1];
  for (const auto& cases : {hostile_headers(), hostile_indexes(), hostile_weights()}) {
    for (const HostileCase& hostile : cases) {
      std::filesystem::create_directories(root / hostile.name);
      make_case(hostile, root / hostile.name);
      std::cout << hostile.name << "\t" << (root / hostile.name / hostile.open).string() << "\t"
                << hostile.rule << "\n";
    }
  }
  return 0;
}
