# SPDX-License-Identifier: Apache-2.0
# The C boundary: errors, lifetimes, sizes, files, plug-ins, threads, processes, growth.
add_moec_test(capi/errors_test LABELS asan aarch64)
add_moec_test(capi/errors_json_test LABELS asan)  # the rows that every binding runs
add_moec_test(capi/desc_errors_test LABELS asan)
add_moec_test(capi/ep_errors_test LABELS asan tsan)
add_moec_test(capi/ep_order_test LABELS asan tsan)
add_moec_test(capi/ep_comm_test LABELS asan tsan)
add_library(fake_nccl MODULE capi/fake_nccl.c)
target_link_libraries(fake_nccl PRIVATE moec_options)
target_link_options(fake_nccl PRIVATE -Wl,-soname,libnccl.so.2)
target_compile_definitions(ep_comm_test PRIVATE FAKE_NCCL="$<TARGET_FILE:fake_nccl>")
add_dependencies(ep_comm_test fake_nccl)
# Peers of other bounds store to the same places: what they send is then forgotten.
add_moec_test(capi/ep_peer_test LABELS asan)
add_moec_test(capi/quant_test LABELS asan)
add_moec_test(capi/schemes_errors_test LABELS asan)
add_moec_test(capi/quantise_errors_test SUPPORT quant LABELS asan)
add_moec_test(capi/lifetime_test LABELS asan)
add_moec_test(capi/sizes_test LABELS asan aarch64)
add_moec_test(capi/scratch_test LABELS asan)
add_moec_test(capi/tensor_test LABELS asan)
add_moec_test(capi/buffers_test LABELS asan tsan)
add_moec_test(capi/device_arrays LABELS asan)
add_moec_test(capi/files_test LABELS asan)
add_moec_test(capi/threads_test LABELS tsan)
add_moec_test(capi/process_test)
if(NOT MOEC_SANITIZE)  # sanitizers bring their own malloc
  add_moec_test(capi/memory_test SOURCES capi/counted_malloc.cpp)
  include(${CMAKE_CURRENT_LIST_DIR}/growth.cmake)
endif()

# Plug-ins that are wrong in one way each, and a right one under two names.
add_moec_test(capi/backend_test)
foreach(kind PLUGIN PLUGIN_COPY PLUGIN_WITHOUT_ENTRY PLUGIN_OF_OTHER_INTERFACE
    PLUGIN_OF_OTHER_BUILD)
  add_library(${kind} MODULE capi/fake_plugin.c)
  target_link_libraries(${kind} PRIVATE moec_options)
  target_compile_definitions(${kind} PRIVATE ${kind})
  target_compile_definitions(backend_test PRIVATE ${kind}="$<TARGET_FILE:${kind}>")
  add_dependencies(backend_test ${kind})
endforeach()
