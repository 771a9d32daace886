# Warnings and sanitizers that every target of ours shares; linked PRIVATE, so that none reaches a project that links
# the libraries. Warnings are for those who work on them.
add_library(monograph_options INTERFACE)
if(MONOGRAPH_WARNINGS)
  target_compile_options(monograph_options INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion)
endif()
target_compile_options(monograph_options INTERFACE -ffp-contract=off)
if(MONOGRAPH_WERROR)
  target_compile_options(monograph_options INTERFACE -Werror)
endif()
if(MONOGRAPH_BUILD_FUZZ)
  # The fuzzer steers by the coverage of the library, not only of its own harness.
  target_compile_options(monograph_options INTERFACE -fsanitize=fuzzer-no-link)
endif()
if(MONOGRAPH_SANITIZE)
  # Not a target with this property: it is compiled as in the release build, whose objects ccache has.
  set(watched "$<NOT:$<BOOL:$<TARGET_PROPERTY:MONOGRAPH_UNWATCHED>>>")
  set(flags -fsanitize=${MONOGRAPH_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  if(MONOGRAPH_SANITIZE MATCHES "address")
    # Half the time to compile; assertions; GCC warns falsely in code that it has instrumented.
    list(APPEND flags -O1 -g1 -UNDEBUG -Wno-error)
  else()
    list(APPEND flags -g1)
  endif()
  target_compile_options(monograph_options INTERFACE "$<${watched}:${flags}>")
  target_link_options(monograph_options INTERFACE -fsanitize=${MONOGRAPH_SANITIZE})
endif()
