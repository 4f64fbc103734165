# SPDX-License-Identifier: Apache-2.0
# tidy: clang-tidy on the library (scripts/tidy.py): the files of a room as one, and alone what has
# flags of its own.
block()
find_program(MOEC_CLANG_TIDY clang-tidy HINTS build/venv/bin REQUIRED)
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(place ${PROJECT_BINARY_DIR}/tidy)
# It parses the standard library once, as a module.
file(CONFIGURE OUTPUT ${place}/precompiled.modulemap CONTENT
  "module precompiled { header \"${PROJECT_SOURCE_DIR}/src/core/precompiled.h\" export * }\n")
set(rooms "")
get_target_property(sources moec_objects SOURCES)
foreach(source IN LISTS sources)
  cmake_path(GET source PARENT_PATH room)
  cmake_path(RELATIVE_PATH room BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
  get_source_file_property(alone ${source} SKIP_PRECOMPILE_HEADERS)
  if(alone)
    cmake_path(GET source STEM room)
  endif()
  string(MAKE_C_IDENTIFIER ${room} room)
  list(APPEND rooms ${room})
  list(APPEND files_${room} ${source})
endforeach()
list(REMOVE_DUPLICATES rooms)
set(stamps "")
foreach(room IN LISTS rooms)
  set(unit ${place}/${room}.cpp)
  add_custom_command(OUTPUT ${unit}.stamp
    COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/tidy.py ${MOEC_CLANG_TIDY}
      ${PROJECT_BINARY_DIR} ${unit} ${files_${room}}
    DEPENDS ${files_${room}} ${PROJECT_SOURCE_DIR}/scripts/tidy.py ${PROJECT_SOURCE_DIR}/.clang-tidy
    DEPFILE ${unit}.d COMMENT "clang-tidy ${room}" VERBATIM)
  list(APPEND stamps ${unit}.stamp)
endforeach()
add_custom_target(tidy ALL DEPENDS ${stamps})
endblock()
