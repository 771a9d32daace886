# small_code(TARGET REGEX): the sources of TARGET that REGEX finds have no hot loop, and are compiled for size: half the code of -O2.
# No value changes: nothing is contracted or reordered at either level. The others stay at -O2.
function(small_code target regex)
  # Sanitizers set a level of their own.
  if(MONOGRAPH_SANITIZE)
    use_precompiled_header(${target} precompiled_library)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources EXCLUDE REGEX "^\\$<TARGET_OBJECTS")
  list(FILTER sources INCLUDE REGEX ${regex})
  set_property(SOURCE ${sources} TARGET_DIRECTORY ${target} APPEND PROPERTY COMPILE_OPTIONS -Os)
  use_precompiled_header(${target} precompiled_small ONLY ${regex})
  use_precompiled_header(${target} precompiled_library EXCEPT ${regex})
endfunction()
