# SPDX-License-Identifier: Apache-2.0
# What cpack packs (scripts/packages.sh): libmoec0, libmoec-dev and, where the plug-in is built,
# libmoec-cuda0, of the libraries that packaged.cmake links. A system package goes to /usr.
set(packages packaged dev)
set(package_name_packaged libmoec${MOEC_ABI})
set(package_name_dev libmoec-dev)
set(package_name_cuda_packaged libmoec-cuda${MOEC_ABI})
install(TARGETS moec_packaged EXCLUDE_FROM_ALL
  LIBRARY COMPONENT packaged NAMELINK_SKIP)
if(MOEC_CUDA)
  list(APPEND packages cuda_packaged)
  install(TARGETS moec_cuda_packaged EXCLUDE_FROM_ALL
    LIBRARY COMPONENT cuda_packaged NAMELINK_SKIP)
endif()

set(CPACK_PACKAGE_NAME moec)
set(CPACK_PACKAGE_VENDOR "the moec authors")
set(CPACK_PACKAGE_CONTACT "The moec authors <packages@moec.dev>")
set(CPACK_PACKAGE_HOMEPAGE_URL https://moec.dev/moec)
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES OFF)  # the libraries are stripped as they are linked
set(CPACK_COMPONENTS_ALL ${packages})
set(CPACK_COMPONENTS_GROUPING IGNORE)  # a package each
string(CONCAT about
  "moec runs the Mixture-of-Experts layers of transformer models: router, plan\n"
  "and grouped experts, forward and backward, in fp32, fp16, bf16 and from\n"
  "quantised weights, behind one C ABI. This package has\n")
set(CPACK_COMPONENT_PACKAGED_DESCRIPTION "${about}the library for CPUs.")
set(CPACK_COMPONENT_DEV_DESCRIPTION
  "${about}the header, the static library, and what pkg-config and CMake find them by.")
set(CPACK_COMPONENT_CUDA_PACKAGED_DESCRIPTION
  "${about}the plug-in for NVIDIA GPUs of compute capability 8.0 and newer.")

# ---- archive: relocatable; `cpack -D CPACK_COMPONENTS_GROUPING=ALL_COMPONENTS_IN_ONE` ----
set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_ARCHIVE_FILE_NAME moec-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR})

# ---- .deb ----
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(architecture_x86_64 amd64)
set(architecture_aarch64 arm64)
set(CPACK_DEBIAN_PACKAGE_ARCHITECTURE ${architecture_${CMAKE_SYSTEM_PROCESSOR}})
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
# What the libraries are linked for (scripts/link_packaged.sh), on every processor.
set(system "libc6 (>= 2.28), libgcc-s1, libstdc++6 (>= 8)")
set(runtime "${package_name_packaged} (= ${PROJECT_VERSION}-1)")
set(CPACK_DEBIAN_PACKAGED_PACKAGE_DEPENDS "${system}")
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "${runtime}")
set(CPACK_DEBIAN_DEV_PACKAGE_RECOMMENDS "libstdc++-dev")  # for the static library
set(CPACK_DEBIAN_CUDA_PACKAGED_PACKAGE_DEPENDS "${runtime}, ${system}")

# ---- .rpm ----
set(CPACK_RPM_COMPONENT_INSTALL ON)
set(CPACK_RPM_FILE_NAME RPM-DEFAULT)
set(CPACK_RPM_PACKAGE_ARCHITECTURE ${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_RPM_PACKAGE_LICENSE Apache-2.0)
set(CPACK_RPM_PACKAGE_AUTOREQ ON)
set(CPACK_RPM_PACKAGE_AUTOPROV ON)
set(CPACK_RPM_SPEC_MORE_DEFINE "%define _build_id_links none")
set(CPACK_RPM_DEV_PACKAGE_REQUIRES "${package_name_packaged} = ${PROJECT_VERSION}")
set(CPACK_RPM_CUDA_PACKAGED_PACKAGE_REQUIRES "${package_name_packaged} = ${PROJECT_VERSION}")

# What each Debian package also has to have: a copyright, a changelog, and of a library the trigger
# by which ldconfig is run, and what a package that is linked to it depends on.
set(folder ${PROJECT_BINARY_DIR}/packages)
set(soname_packaged libmoec)
set(soname_cuda_packaged libmoec_cuda)
find_program(MOEC_GZIP gzip REQUIRED)
string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)  # SOURCE_DATE_EPOCH, if it is set
string(CONCAT copyright
  "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
  "Upstream-Name: moec\nUpstream-Contact: ${CPACK_PACKAGE_CONTACT}\n"
  "Source: ${CPACK_PACKAGE_HOMEPAGE_URL}\n\n"
  "Files: *\nCopyright: 2026 the moec authors\nLicense: Apache-2.0\n"
  " On Debian systems the text of the Apache License 2.0 is in\n"
  " /usr/share/common-licenses/Apache-2.0.\n")
string(CONCAT changelog
  "${CPACK_PACKAGE_NAME} (${PROJECT_VERSION}-1) unstable; urgency=medium\n\n"
  "  * Version ${PROJECT_VERSION}: changelog.gz says what is new.\n\n"
  " -- ${CPACK_PACKAGE_CONTACT}  ${date}\n")
foreach(package IN LISTS packages)
  string(TOUPPER ${package} upper)
  set(name ${package_name_${package}})
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${name})
  set(CPACK_RPM_${upper}_PACKAGE_NAME ${name})
  file(WRITE ${folder}/${name}/copyright "${copyright}")
  file(WRITE ${folder}/${name}/changelog.Debian "${changelog}")
  execute_process(COMMAND ${MOEC_GZIP} -9nc ${folder}/${name}/changelog.Debian
    OUTPUT_FILE ${folder}/${name}/changelog.Debian.gz COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${MOEC_GZIP} -9nc ${PROJECT_SOURCE_DIR}/CHANGELOG.md
    OUTPUT_FILE ${folder}/${name}/changelog.gz COMMAND_ERROR_IS_FATAL ANY)
  install(FILES ${folder}/${name}/copyright ${folder}/${name}/changelog.gz
    ${folder}/${name}/changelog.Debian.gz
    DESTINATION share/doc/${name} COMPONENT ${package} EXCLUDE_FROM_ALL)
  if(soname_${package})
    file(WRITE ${folder}/${name}/shlibs
      "${soname_${package}} ${MOEC_ABI} ${name} (>= ${PROJECT_VERSION})\n")
    file(WRITE ${folder}/${name}/triggers "activate-noawait ldconfig\n")
    set(CPACK_DEBIAN_${upper}_PACKAGE_CONTROL_EXTRA
      "${folder}/${name}/shlibs;${folder}/${name}/triggers")
  endif()
endforeach()
include(CPack)
