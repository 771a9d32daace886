# add_unit_test(NAME SOURCE): one GoogleTest program, run once for each instruction set that is built.
# A set the machine lacks is skipped by the tests themselves, which say so.
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  # Cross builds have no package: Debian ships GoogleTest's sources.
  add_subdirectory(/usr/src/googletest ${CMAKE_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
  add_library(GTest::gtest_main ALIAS gtest_main)
endif()

function(add_unit_test name)
  add_executable(test_${name} ${ARGN})
  target_link_libraries(test_${name} PRIVATE monograph_core GTest::gtest_main)
  # GoogleTest's macros end in an else of their own.
  target_compile_options(test_${name} PRIVATE -Wno-dangling-else)
  foreach(isa IN LISTS MONOGRAPH_ISAS)
    add_test(NAME ${name}.${isa} COMMAND test_${name})
    set_tests_properties(${name}.${isa} PROPERTIES ENVIRONMENT "MONOGRAPH_ISA=${isa}")
  endforeach()
endfunction()
