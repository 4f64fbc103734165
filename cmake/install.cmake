# SPDX-License-Identifier: Apache-2.0
include(CMakePackageConfigHelpers)
# Components are packages: dev has what programs are compiled with.
install(TARGETS ${moec_libraries} EXPORT moecTargets
  LIBRARY COMPONENT runtime NAMELINK_COMPONENT dev ARCHIVE COMPONENT dev)
install(FILES capi/include/moec/moec.h capi/include/moec/mpi.h capi/include/moec/nccl.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moec COMPONENT dev)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moec)
install(EXPORT moecTargets NAMESPACE moec:: DESTINATION ${package_dir} COMPONENT dev)
configure_package_config_file(pkgconfig/moecConfig.cmake.in
  ${PROJECT_BINARY_DIR}/moecConfig.cmake INSTALL_DESTINATION ${package_dir}
  PATH_VARS CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/moecConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)  # SameMajorVersion from 1.0 on
install(FILES ${PROJECT_BINARY_DIR}/moecConfig.cmake ${PROJECT_BINARY_DIR}/moecConfigVersion.cmake
  DESTINATION ${package_dir} COMPONENT dev)

# Relocatable: the prefix is said from where moec.pc lies, unless that is an absolute folder.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(MOEC_PC_PREFIX ${CMAKE_INSTALL_PREFIX})
else()
  file(RELATIVE_PATH up /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  set(MOEC_PC_PREFIX "\${pcfiledir}/${up}")
endif()
foreach(dir LIBDIR INCLUDEDIR)
  set(MOEC_PC_${dir} ${CMAKE_INSTALL_${dir}})
  if(NOT IS_ABSOLUTE "${MOEC_PC_${dir}}")
    string(PREPEND MOEC_PC_${dir} "\${prefix}/")
  endif()
endforeach()
configure_file(pkgconfig/moec.pc.in ${PROJECT_BINARY_DIR}/moec.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/moec.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT dev)
