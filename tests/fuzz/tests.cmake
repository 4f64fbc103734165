# SPDX-License-Identifier: Apache-2.0
# fuzz_capi: every entry point of moec.h with random arguments; its call table is generated from
# bindings/api.json, which house/api holds equal to the header.
set(MOEC_FUZZ_SECONDS 30 CACHE STRING "CPU time of the fuzzer in ctest")
set(fuzz_table ${PROJECT_BINARY_DIR}/generated/fuzz_table.inc)
add_custom_command(OUTPUT ${fuzz_table}
  COMMAND ${MOEC_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/make_table.py
    ${PROJECT_SOURCE_DIR}/bindings/api.json > ${fuzz_table}
  DEPENDS ${CMAKE_CURRENT_LIST_DIR}/make_table.py ${PROJECT_SOURCE_DIR}/bindings/api.json
  VERBATIM)
add_executable(fuzz_capi fuzz/fuzz_capi.cpp fuzz/valid.cpp ${fuzz_table})
target_include_directories(fuzz_capi PRIVATE ${PROJECT_BINARY_DIR}/generated)
target_link_libraries(fuzz_capi PRIVATE moec moec_options)
add_dependencies(tests_asan fuzz_capi)
add_test(NAME fuzz/fuzz_capi COMMAND fuzz_capi ${MOEC_FUZZ_SECONDS})
set_tests_properties(fuzz/fuzz_capi PROPERTIES LABELS "fuzz;asan"
  ENVIRONMENT "ASAN_OPTIONS=allocator_may_return_null=1:max_allocation_size_mb=512")
