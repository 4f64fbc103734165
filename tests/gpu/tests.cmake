# SPDX-License-Identifier: Apache-2.0
# Tests of the CUDA backend, built with MOEC_CUDA and run by `make test-gpu` on a machine with a
# GPU; every program exits with 77 where there is none. bin/gpu_tests.txt lists them for a machine
# that only runs them:
# PROGRAM [VARIABLE=value] [memcheck] [racecheck] [initcheck] [busy | alone | thirds].
add_custom_target(gpu_tests)
set(busy kernel_check small_check)  # they wait for the GPU, not for the host
set(alone graph_test repeat_test)  # kernels of several programs never run at once
# Their checks are dealt to three processes.
set(thirds lines_test wide_test decoded_test decoded_rows_test ep_gpu_test ep_layer_test)
set(gpu_test_lines "")

macro(add_gpu_line program)  # what else stands on the line
  add_dependencies(gpu_tests ${program} moec_cuda)
  string(JOIN " " line ${program} ${ARGN})
  foreach(turn busy alone thirds)
    if(${program} IN_LIST ${turn})
      string(APPEND line " ${turn}")
    endif()
  endforeach()
  list(APPEND gpu_test_lines ${line})
endmacro()

# add_gpu_test(NAME [KERNELS] [SANITIZE | BULK] [SOURCES more files...]
# [SUPPORT names...]): one GoogleTest program, through moec.h and the CUDA runtime. With KERNELS it
# links the plug-in's objects in place of the library and calls the kernels themselves. With
# SANITIZE it runs under the sanitizers, too, which MOEC_CHECK_SMALL=1 tells it; with BULK without
# initcheck, which does not see what bulk copies of Hopper's kernels write.
macro(add_gpu_test name)
  cmake_parse_arguments(arg "KERNELS;SANITIZE;BULK" "" "SOURCES;SUPPORT" ${ARGN})
  list(TRANSFORM arg_SOURCES PREPEND gpu/)
  if(arg_KERNELS)
    add_moec_test(gpu/${name} BARE SOURCES ${arg_SOURCES} SUPPORT ${arg_SUPPORT} LABELS gpu)
    target_sources(${name} PRIVATE ${cuda_objects})
    target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
    target_link_libraries(${name} PRIVATE ${CMAKE_DL_LIBS})
  else()
    add_moec_test(gpu/${name} SOURCES ${arg_SOURCES} SUPPORT ${arg_SUPPORT} LABELS gpu)
  endif()
  set_target_properties(${name} PROPERTIES CUDA_STANDARD 20 CUDA_ARCHITECTURES "80-real;90")
  target_link_libraries(${name} PRIVATE CUDA::cudart_static)
  if(arg_SANITIZE)
    add_gpu_line(${name} memcheck racecheck initcheck)
  elseif(arg_BULK)
    add_gpu_line(${name} memcheck racecheck)
  else()
    add_gpu_line(${name})
  endif()
endmacro()

# What several programs need is compiled once.
add_library(moec_step_support STATIC EXCLUDE_FROM_ALL gpu/step.cpp)
add_library(moec_agree_support STATIC EXCLUDE_FROM_ALL gpu/agree.cpp)
add_library(moec_kernel_support STATIC EXCLUDE_FROM_ALL gpu/experts_problem.cpp gpu/plain.cu)
set_target_properties(moec_kernel_support PROPERTIES CUDA_STANDARD 20
  CUDA_ARCHITECTURES "80-real;90")
target_include_directories(moec_kernel_support PRIVATE ${PROJECT_SOURCE_DIR}/src)
foreach(library moec_step_support moec_agree_support moec_kernel_support)
  target_link_libraries(${library} PUBLIC moec_test_support CUDA::cudart_static)
  use_test_headers(${library} 1)
endforeach()

add_gpu_test(graph_test SUPPORT step)
add_gpu_test(repeat_test SOURCES occupy.cu SUPPORT step)
add_gpu_test(device_test SUPPORT step)
add_gpu_test(paths_test)
add_gpu_test(coded_test SOURCES coded_problem.cpp)
add_gpu_test(short_lines_test SANITIZE SUPPORT quant)
add_gpu_test(one_token_test SANITIZE SUPPORT cases quant)
add_gpu_test(lines_test BULK SUPPORT quant)
add_gpu_test(wide_test BULK SUPPORT quant)
add_gpu_test(decoded_test BULK SUPPORT quant)
add_gpu_test(decoded_rows_test SANITIZE SUPPORT quant)
foreach(name one_token_test short_lines_test lines_test wide_test decoded_test decoded_rows_test)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
endforeach()
add_gpu_test(buffer_test)
add_gpu_test(ep_gpu_test BULK SOURCES ep_board.cpp SUPPORT step)
target_link_libraries(ep_gpu_test PRIVATE moec_ep_support)
add_gpu_test(ep_processes_test)
add_gpu_test(kernel_check KERNELS SANITIZE
  SOURCES weight_grad_check.cpp plan_check.cpp routes_check.cpp SUPPORT kernel)
add_gpu_test(small_check KERNELS SANITIZE SUPPORT kernel)
add_gpu_test(backends_agree SANITIZE SUPPORT agree)
add_gpu_test(quantise_agrees SANITIZE SUPPORT agree quant)
add_gpu_test(routing_agrees SANITIZE
  SOURCES agree_router.cpp agree_plan.cpp agree_loss.cpp SUPPORT agree)
set(layer_tests golden_test features_test sweep_test types_test experts_test plans_test
  routing_test mixed_test mixed_plans_test mixed_routers_test values_test schemes_test
  neighbours_test formats_test golden_formats_test quantise_test quantise_golden_test packed_test
  adapters_test adapters_golden_test adapters_merge_test adapters_copy_test coded_memory_test
  ep_layer_test ep_losses_test)
foreach(name ${layer_tests})
  add_gpu_line(${name} MOEC_TEST_DEVICE=cuda)  # the layer's tests once more
endforeach()
add_gpu_line(adapters_test MOEC_TEST_DEVICE=cuda MOEC_CUDA_KERNELS=sm90 GTEST_FILTER=Hopper/*)
add_gpu_line(device_arrays MOEC_TEST_DEVICE=cuda)  # what a user of C does
foreach(name graph_test repeat_test)
  add_gpu_line(${name} MOEC_CUDA_KERNELS=few_rows GTEST_FILTER=*coded_few_rows*)
endforeach()
set(portable MOEC_CUDA_KERNELS=portable)  # what Hopper's kernels would take
foreach(name graph_test repeat_test)
  add_gpu_line(${name} ${portable})
endforeach()
add_gpu_line(ep_gpu_test ${portable} GTEST_FILTER=*Bounds*)
add_gpu_line(mixed_test MOEC_TEST_DEVICE=cuda ${portable})
add_gpu_line(schemes_test MOEC_TEST_DEVICE=cuda ${portable})
add_gpu_line(neighbours_test MOEC_TEST_DEVICE=cuda ${portable})
add_gpu_line(sweep_test MOEC_TEST_DEVICE=cuda ${portable})
add_gpu_line(types_test MOEC_TEST_DEVICE=cuda ${portable} memcheck racecheck initcheck)

string(JOIN "\n" gpu_test_lines ${gpu_test_lines})
file(GENERATE OUTPUT ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/gpu_tests.txt CONTENT "${gpu_test_lines}\n")
