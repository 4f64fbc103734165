# SPDX-License-Identifier: Apache-2.0
# The build id ties a plug-in to its library: the version and a hash of what both must agree on,
# the headers that both include. It does not depend on the state of the repository, so that an
# unrelated edit rebuilds nothing.
file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/capi/include/moec/moec.h
  ${PROJECT_SOURCE_DIR}/src/core/*.h ${PROJECT_SOURCE_DIR}/src/math/*.h
  ${PROJECT_SOURCE_DIR}/src/quant/*.h ${PROJECT_SOURCE_DIR}/src/backend/*.h)
set(contract "")
foreach(header ${headers})
  file(SHA256 ${header} hash)
  string(APPEND contract ${hash})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${header})
endforeach()
string(SHA256 contract "${contract}")
string(SUBSTRING ${contract} 0 16 contract)
set(MOEC_BUILD_ID ${PROJECT_VERSION}-${contract})
configure_file(cmake/build_id.h.in generated/core/build_id.h @ONLY)
