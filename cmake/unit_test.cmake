# add_unit_test(NAME SOURCES ... [ISAS ... | ONCE] [LIBRARY ...] [UNWATCHED]): one GoogleTest program that links LIBRARY
# (monograph_kernels, if none is named). It is run once for each of these instruction sets (all that are built, if none
# are named), or ONCE where nothing depends on them.
# UNWATCHED: AddressSanitizer watches the library alone; the test's loops in double precision would be most of the time.
# A set the machine lacks is skipped by the tests themselves, which say so.
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  # Cross builds have no package: Debian ships GoogleTest's sources.
  add_subdirectory(/usr/src/googletest ${PROJECT_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
  if(NOT TARGET GTest::gtest_main)
    add_library(GTest::gtest_main ALIAS gtest_main)
  endif()
endif()

function(add_unit_test name)
  cmake_parse_arguments(TEST "ONCE;UNWATCHED" "LIBRARY" "SOURCES;ISAS" ${ARGN})
  if(NOT TEST_ISAS)
    set(TEST_ISAS ${MONOGRAPH_ISAS})
  endif()
  if(NOT TEST_LIBRARY)
    set(TEST_LIBRARY monograph_kernels)
  endif()
  add_executable(test_${name} ${TEST_SOURCES})
  target_link_libraries(test_${name} PRIVATE ${TEST_LIBRARY} monograph_options GTest::gtest_main)
  # GoogleTest's macros end in an else of their own. A test runs for a moment: compiling it is most of its time.
  target_compile_options(test_${name} PRIVATE -Wno-dangling-else -O1)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC 12 warns falsely about strings at -O1 (GCC bug 105651 and its kin).
    target_compile_options(test_${name} PRIVATE -Wno-error=array-bounds -Wno-error=restrict -Wno-error=stringop-overflow
                                                -Wno-error=stringop-overread -Wno-error=maybe-uninitialized)
  endif()
  set(kind tests)
  if(TEST_UNWATCHED AND MONOGRAPH_SANITIZE MATCHES "address")
    set_target_properties(test_${name} PROPERTIES MONOGRAPH_UNWATCHED ON)
    set(kind unwatched_tests)
  endif()
  use_precompiled_header(test_${name} precompiled_${kind})
  if(TEST_ONCE)
    add_test(NAME ${name} COMMAND test_${name})
    return()
  endif()
  foreach(isa IN LISTS TEST_ISAS)
    if(isa IN_LIST MONOGRAPH_ISAS)
      add_test(NAME ${name}.${isa} COMMAND test_${name})
      set_tests_properties(${name}.${isa} PROPERTIES ENVIRONMENT "MONOGRAPH_ISA=${isa}")
    endif()
  endforeach()
endfunction()
