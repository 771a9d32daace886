# add_kernel(NAME ISAS scalar avx2 ... [SOURCES ...] [TESTS ...]): the sources of
# core/monograph/kernels/NAME. The only file that knows -m flags.
# An ISA unit is -O2, never link-time optimised, and fuses multiply-add only where written. Under AddressSanitizer it is -O1,
# which halves the time to compile it, and UndefinedBehaviorSanitizer, which doubles it, watches scalar units alone. Sets that
# MONOGRAPH_WATCHED_ISAS does not name are compiled as in the release build.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(MONOGRAPH_TARGETS x86_64)
  set(MONOGRAPH_ISAS scalar avx2 avx512 avx512_bf16 amx)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(MONOGRAPH_TARGETS aarch64)
  set(MONOGRAPH_ISAS scalar neon)
else()
  set(MONOGRAPH_TARGETS other)
  set(MONOGRAPH_ISAS scalar)
endif()

# NEON is a part of the baseline.
set(MONOGRAPH_FLAGS_scalar "")
set(MONOGRAPH_FLAGS_neon "")
set(MONOGRAPH_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi2)
set(MONOGRAPH_FLAGS_avx512 ${MONOGRAPH_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
set(MONOGRAPH_FLAGS_avx512_bf16 ${MONOGRAPH_FLAGS_avx512} -mavx512bf16)
set(MONOGRAPH_FLAGS_amx ${MONOGRAPH_FLAGS_avx512_bf16} -mavx512vbmi -mamx-tile -mamx-bf16 -mamx-int8)

set(MONOGRAPH_WATCHED_ISAS ${MONOGRAPH_ISAS} CACHE STRING "Instruction sets whose units a sanitizer watches")

# is_unwatched(OUT ISA): whether a sanitizer is on and does not watch the units of this instruction set.
function(is_unwatched out isa)
  set(${out} OFF PARENT_SCOPE)
  if(MONOGRAPH_SANITIZE MATCHES "address|thread" AND NOT isa IN_LIST MONOGRAPH_WATCHED_ISAS)
    set(${out} ON PARENT_SCOPE)
  endif()
endfunction()

# isa_flags(OUT ISA): what a unit of this instruction set is compiled with.
function(isa_flags out isa)
  # std::conditional_t over vector types drops an alignment attribute that a value type does not need.
  set(flags ${MONOGRAPH_FLAGS_${isa}} -O2 -fno-lto -Wno-ignored-attributes)
  is_unwatched(unwatched ${isa})
  if(MONOGRAPH_SANITIZE MATCHES "address" AND NOT unwatched)
    list(APPEND flags -O1)
    if(NOT isa STREQUAL "scalar")
      list(APPEND flags -fno-sanitize=undefined)
    endif()
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND isa MATCHES "avx512|amx")
    # GCC 12 warns falsely inside avx512fintrin.h.
    list(APPEND flags -Wno-maybe-uninitialized -Wno-uninitialized)
  endif()
  set(${out} ${flags} PARENT_SCOPE)
endfunction()

function(add_kernel name)
  cmake_parse_arguments(KERNEL "" "" "ISAS;SOURCES;TESTS" ${ARGN})
  target_sources(monograph_kernels PRIVATE kernels/${name}/${name}.cpp ${KERNEL_SOURCES})
  foreach(isa IN LISTS KERNEL_ISAS)
    if(NOT isa IN_LIST MONOGRAPH_ISAS)
      continue()
    endif()
    set(unit kernels/${name}/${isa}.cpp)
    is_unwatched(unwatched ${isa})
    if(unwatched)
      target_sources(monograph_unwatched_kernels PRIVATE ${unit})
    else()
      target_sources(monograph_kernels PRIVATE ${unit})
    endif()
    isa_flags(flags ${isa})
    set_source_files_properties(${unit} PROPERTIES COMPILE_OPTIONS "${flags}")
  endforeach()
  if(MONOGRAPH_BUILD_TESTS)
    add_unit_test(${name} SOURCES kernels/${name}/tests/test_${name}.cpp ${KERNEL_TESTS} ISAS ${KERNEL_ISAS}
                  UNWATCHED)
  endif()
endfunction()
