# Installs what another project links: find_package(monograph) gives monograph::kernels, monograph::checkpoint
# and monograph::train.
# Component "development"; the wheel takes only "operators" and "tool".
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# with_included_headers(OUT HEADER ...): these headers of core/ and every header of ours that they include. The
# contracts are named, what they need follows; tests and units of instruction sets stay behind.
function(with_included_headers out)
  set(found "")
  set(open ${ARGN})
  while(open)
    list(POP_FRONT open header)
    if(header IN_LIST found OR header STREQUAL "monograph/version.h")
      continue()
    endif()
    list(APPEND found ${header})
    file(STRINGS ${PROJECT_SOURCE_DIR}/core/${header} lines REGEX "^#include \"monograph/")
    foreach(line IN LISTS lines)
      string(REGEX REPLACE "^#include \"(.*)\".*$" "\\1" included "${line}")
      list(APPEND open ${included})
    endforeach()
  endwhile()
  set(${out} ${found} PARENT_SCOPE)
endfunction()

list(TRANSFORM MONOGRAPH_KERNELS_HEADERS PREPEND monograph/)
list(TRANSFORM MONOGRAPH_CHECKPOINT_HEADERS PREPEND monograph/)
list(TRANSFORM MONOGRAPH_TRAIN_HEADERS PREPEND monograph/)
with_included_headers(headers ${MONOGRAPH_KERNELS_HEADERS} ${MONOGRAPH_CHECKPOINT_HEADERS} ${MONOGRAPH_TRAIN_HEADERS})
foreach(header IN LISTS headers)
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES core/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder} COMPONENT development)
endforeach()
install(FILES ${PROJECT_BINARY_DIR}/include/monograph/version.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/monograph COMPONENT development)

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/monograph)
set_target_properties(monograph_kernels PROPERTIES EXPORT_NAME kernels)
set_target_properties(monograph_checkpoint PROPERTIES EXPORT_NAME checkpoint)
set_target_properties(monograph_train PROPERTIES EXPORT_NAME train)
install(TARGETS monograph_kernels monograph_checkpoint monograph_train EXPORT monographTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT monographTargets NAMESPACE monograph:: DESTINATION ${package} COMPONENT development)
configure_package_config_file(cmake/monographConfig.cmake.in ${PROJECT_BINARY_DIR}/monographConfig.cmake
                              INSTALL_DESTINATION ${package})
# Before 1.0 any minor version may change an interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/monographConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/monographConfig.cmake ${PROJECT_BINARY_DIR}/monographConfigVersion.cmake
        DESTINATION ${package} COMPONENT development)
