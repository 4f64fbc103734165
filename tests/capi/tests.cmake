# SPDX-License-Identifier: Apache-2.0
# The C boundary: errors, lifetimes, sizes, growth, threads, processes.
add_moec_test(capi/errors_test LABELS asan)
add_moec_test(capi/desc_errors_test LABELS asan)
add_moec_test(capi/lifetime_test LABELS asan)
add_moec_test(capi/sizes_test LABELS asan)
add_moec_test(capi/files_test LABELS asan)
add_moec_test(capi/backend_test LABELS asan)
add_moec_test(capi/threads_test LABELS tsan)
add_moec_test(capi/process_test)
add_moec_test(capi/memory_test)
