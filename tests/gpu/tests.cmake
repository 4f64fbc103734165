# SPDX-License-Identifier: Apache-2.0
# Tests of the CUDA backend, built with MOEC_CUDA and run by `make test-gpu` on a machine with a
# GPU; every program exits with 77 where there is none. bin/gpu_tests.txt lists them for a machine
# that only runs them: PROGRAM [VARIABLE=value] [sanitize] [busy | alone].
add_custom_target(gpu_tests)
set(busy kernel_check small_check)  # they wait for the GPU, not for the host
set(alone graph_test repeat_test)  # kernels of several programs never run at once
set(gpu_test_lines "")

macro(add_gpu_line program)  # what else stands on the line
  add_dependencies(gpu_tests ${program} moec_cuda)
  string(JOIN " " line ${program} ${ARGN})
  foreach(turn busy alone)
    if(${program} IN_LIST ${turn})
      string(APPEND line " ${turn}")
    endif()
  endforeach()
  list(APPEND gpu_test_lines ${line})
endmacro()

# add_gpu_test(NAME [SOURCES more files...]): GoogleTest through moec.h and the CUDA runtime.
macro(add_gpu_test name)
  add_moec_test(gpu/${name} ${ARGN} LABELS gpu)
  target_link_libraries(${name} PRIVATE CUDA::cudart_static)
  add_gpu_line(${name})
endmacro()

# add_gpu_program(FILE [KERNELS] [SANITIZE] [SOURCES more files...]): a program of its own. With
# KERNELS it links the plug-in's objects and calls the kernels themselves. With SANITIZE it runs
# under the sanitizers, too, which MOEC_CHECK_SMALL=1 tells it.
macro(add_gpu_program file)
  cmake_parse_arguments(arg "KERNELS;SANITIZE" "" "SOURCES" ${ARGN})
  get_filename_component(name ${file} NAME_WE)
  list(TRANSFORM arg_SOURCES PREPEND gpu/)
  add_executable(${name} gpu/${file} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}
    ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/capi/include ${PROJECT_BINARY_DIR}/generated)
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  set_target_properties(${name} PROPERTIES CUDA_STANDARD 20 CUDA_ARCHITECTURES 90a-real)
  target_link_libraries(${name} PRIVATE moec_options CUDA::cudart_static ${CMAKE_DL_LIBS})
  if(arg_KERNELS)
    target_sources(${name} PRIVATE ${cuda_objects})
    target_link_libraries(${name} PRIVATE CUDA::cublasLt)
    target_link_options(${name} PRIVATE LINKER:--as-needed)
  else()
    target_link_libraries(${name} PRIVATE moec)
  endif()
  if(arg_SANITIZE)
    add_gpu_line(${name} sanitize)
  else()
    add_gpu_line(${name})
  endif()
endmacro()

add_gpu_test(graph_test SOURCES gpu/step.cpp)
add_gpu_test(repeat_test SOURCES gpu/step.cpp gpu/occupy.cu)
set_target_properties(repeat_test PROPERTIES CUDA_ARCHITECTURES 80)
add_gpu_test(device_test SOURCES gpu/step.cpp)
add_gpu_test(paths_test)
add_gpu_test(coded_test SOURCES gpu/coded_problem.cpp)
add_gpu_test(buffer_test)
add_gpu_program(kernel_check.cu KERNELS SANITIZE)
add_gpu_program(small_check.cu KERNELS SANITIZE)
add_gpu_program(backends_agree.cpp SANITIZE)
add_gpu_program(routing_agrees.cpp SANITIZE
  SOURCES agree.cpp agree_router.cpp agree_plan.cpp agree_loss.cpp)
set(layer_tests golden_test features_test sweep_test types_test experts_test plans_test
  routing_test mixed_test mixed_plans_test mixed_routers_test)
foreach(name ${layer_tests})
  add_gpu_line(${name} MOEC_TEST_DEVICE=cuda)  # the layer's tests once more
endforeach()
set(portable MOEC_CUDA_KERNELS=portable)  # what Hopper's kernels would take
foreach(name graph_test repeat_test)
  add_gpu_line(${name} ${portable})
endforeach()
add_gpu_line(mixed_test MOEC_TEST_DEVICE=cuda ${portable})
add_gpu_line(sweep_test MOEC_TEST_DEVICE=cuda ${portable})
add_gpu_line(types_test MOEC_TEST_DEVICE=cuda ${portable} sanitize)

string(JOIN "\n" gpu_test_lines ${gpu_test_lines})
file(GENERATE OUTPUT ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/gpu_tests.txt CONTENT "${gpu_test_lines}\n")
