# use_precompiled_header(TARGET KIND [ONLY REGEX | EXCEPT REGEX]): the sources that TARGET has by now include a header of
# precompiled/, as text, and GCC finds it compiled. KIND has the flags of these sources.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # clang goes without, and so finds the includes that a file lacks.
  set(MONOGRAPH_PRECOMPILE OFF)
endif()

function(use_precompiled_header target kind)
  if(NOT MONOGRAPH_PRECOMPILE)
    return()
  endif()
  cmake_parse_arguments(USE "" "ONLY;EXCEPT" "" ${ARGN})
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources EXCLUDE REGEX "^\\$<TARGET_OBJECTS")
  if(USE_ONLY)
    list(FILTER sources INCLUDE REGEX ${USE_ONLY})
  endif()
  if(USE_EXCEPT)
    list(FILTER sources EXCLUDE REGEX ${USE_EXCEPT})
  endif()
  foreach(name header object folder)
    string(TOUPPER MONOGRAPH_${name} property)
    get_target_property(${name} ${kind} ${property})
  endforeach()
  add_dependencies(${target} ${kind})
  # GCC names no header of a precompiled one as a dependency of the unit.
  set_property(SOURCE ${sources} TARGET_DIRECTORY ${target} APPEND PROPERTY OBJECT_DEPENDS ${object})
  set_property(
    SOURCE ${sources} TARGET_DIRECTORY ${target} APPEND
    PROPERTY COMPILE_OPTIONS -Winvalid-pch -iquote ${folder} -iquote ${PROJECT_SOURCE_DIR}/precompiled
             -include ${header})
  if(NOT kind MATCHES "_(scalar|avx2|avx512|avx512_bf16|amx|neon)$")
    # GCC 12 warns falsely about "text" + std::string (GCC bug 105651 and its kin), more so if <string> is precompiled.
    set_property(
      SOURCE ${sources} TARGET_DIRECTORY ${target} APPEND
      PROPERTY COMPILE_OPTIONS -Wno-array-bounds -Wno-restrict -Wno-stringop-overflow -Wno-stringop-overread
               -Wno-maybe-uninitialized)
  endif()
endfunction()
