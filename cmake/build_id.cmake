# SPDX-License-Identifier: Apache-2.0
# The build id ties a plug-in to its library: the version and a hash of what both must agree on.
# It does not depend on the state of the repository, so that an unrelated edit rebuilds nothing.
set(contract "")
foreach(header capi/include/moec/moec.h src/core/error.h src/backend/args.h src/backend/backend.h)
  file(SHA256 ${PROJECT_SOURCE_DIR}/${header} hash)
  string(APPEND contract ${hash})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${header})
endforeach()
string(SHA256 contract "${contract}")
string(SUBSTRING ${contract} 0 16 contract)
set(MOEC_BUILD_ID ${PROJECT_VERSION}-${contract})
configure_file(cmake/build_id.h.in generated/core/build_id.h @ONLY)
