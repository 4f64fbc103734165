# SPDX-License-Identifier: Apache-2.0
include(CMakePackageConfigHelpers)
install(TARGETS ${moec_libraries} EXPORT moecTargets)
install(FILES capi/include/moec/moec.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moec)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moec)
install(EXPORT moecTargets NAMESPACE moec:: DESTINATION ${package_dir})
configure_package_config_file(pkgconfig/moecConfig.cmake.in
  ${PROJECT_BINARY_DIR}/moecConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/moecConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)  # SameMajorVersion from 1.0 on
install(FILES ${PROJECT_BINARY_DIR}/moecConfig.cmake ${PROJECT_BINARY_DIR}/moecConfigVersion.cmake
  DESTINATION ${package_dir})

# Relocatable: the prefix is said from where moec.pc lies.
file(RELATIVE_PATH MOEC_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(pkgconfig/moec.pc.in ${PROJECT_BINARY_DIR}/moec.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/moec.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
