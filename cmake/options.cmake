# SPDX-License-Identifier: Apache-2.0
# moec_options: how every target of the project is compiled.
add_library(moec_options INTERFACE)
target_compile_features(moec_options INTERFACE cxx_std_20)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

# Fused multiply-adds are written as such, never left to the compiler: the same source gives the
# same bits in every translation unit, whatever its instruction set.
target_compile_options(moec_options INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-ffp-contract=off -fno-math-errno>)

if(MOEC_DEVELOPER)
  target_compile_options(moec_options INTERFACE
    $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wpedantic -Wshadow -Werror>)
endif()

if(MOEC_SANITIZE)
  # Line numbers are all of what -g tells that a report prints; -g takes half as long again.
  # gcc puts vzeroupper behind vectors of 256 bits only with expensive optimisations; without it
  # every instruction of SSE after them, in the oracle, too, takes several times as long.
  set(flags -fsanitize=${MOEC_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g1
    $<$<CXX_COMPILER_ID:GNU>:-fexpensive-optimizations>)
  target_compile_options(moec_options INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:${flags}>)
  target_link_options(moec_options INTERFACE -fsanitize=${MOEC_SANITIZE})
endif()
