# SPDX-License-Identifier: Apache-2.0
# libmoec_cuda.so: the CUDA backend, loaded by libmoec on first need. It exports one C function.
# Kernels of Hopper's (wgmma assembles only for 90a) and portable ones for every GPU: sources.cmake.
enable_language(CUDA)
if(CMAKE_VERSION VERSION_LESS 3.26)
  # Its FindCUDAToolkit wants a library that CUDA 13 has no more. 3.25.1 knows no C++20 of nvcc.
  add_library(CUDA::nvToolsExt INTERFACE IMPORTED)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
find_package(CUDAToolkit 13 REQUIRED)
include(src/backend/cuda/sources.cmake)

# -O of nvcc is that of the host's code, which queues: -O3 has a quarter more bytes than -O2.
string(REPLACE -O3 -O2 CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
set(cuda_objects "")
foreach(set IN ITEMS sm90 portable exact setup host)
  if(NOT MOEC_CUDA_SOURCES_${set})
    continue()
  endif()
  set(target moec_cuda_${set})
  list(TRANSFORM MOEC_CUDA_SOURCES_${set} PREPEND ${PROJECT_SOURCE_DIR}/src/backend/cuda/
       OUTPUT_VARIABLE sources)
  add_library(${target} OBJECT ${sources})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/capi/include
    ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR}/generated)
  target_link_libraries(${target} PRIVATE moec_options CUDA::cudart_static)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr --compress-mode=size
    ${MOEC_CUDA_FLAGS_${set}}>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O2>)  # what queues: half of -O3's bytes
  if(MOEC_DEVELOPER)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xcompiler=-Wall,-Wextra>)
  endif()
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON
    UNITY_BUILD ON UNITY_BUILD_MODE GROUP
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
    CUDA_VISIBILITY_PRESET hidden CUDA_ARCHITECTURES "${MOEC_CUDA_ARCH_${set}}")
  list(APPEND cuda_objects $<TARGET_OBJECTS:${target}>)
endforeach()

set(map ${PROJECT_SOURCE_DIR}/src/backend/cuda/moec_cuda.map)
add_library(moec_cuda SHARED ${cuda_objects})
target_link_libraries(moec_cuda PRIVATE moec_options CUDA::cudart_static)
target_link_options(moec_cuda PRIVATE LINKER:--version-script=${map} LINKER:--exclude-libs,ALL
  LINKER:--as-needed LINKER:-z,nodelete LINKER:-z,relro,-z,now)
# cuBLASLt, which it opens by name, is also looked for in the folder of the Python package
# nvidia-cublas, from where a wheel of moec has the plug-in. Never where it was built.
set_target_properties(moec_cuda PROPERTIES LINKER_LANGUAGE CXX LINK_DEPENDS ${map}
  VERSION ${PROJECT_VERSION} SOVERSION ${MOEC_ABI}
  BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/../../nvidia/cu13/lib")
install(TARGETS moec_cuda DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cuda)  # beside libmoec
