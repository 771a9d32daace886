# add_fuzz_target(NAME SOURCE): a libFuzzer program (clang). MONOGRAPH_FUZZ_ENGINE is what drives it: OSS-Fuzz has others.
set(MONOGRAPH_FUZZ_ENGINE "-fsanitize=fuzzer" CACHE STRING "What a fuzz target links")
function(add_fuzz_target name source)
  add_executable(fuzz_${name} ${source})
  target_link_libraries(fuzz_${name} PRIVATE monograph_checkpoint monograph_options)
  target_link_libraries(fuzz_${name} PRIVATE ${MONOGRAPH_FUZZ_ENGINE})
endfunction()
