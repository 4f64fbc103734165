#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_c.sh: the C package as installed: api.json's layouts and constants as static assertions of
# gcc and clang; examples/c and the programs of docs/ built through pkg-config, shared and static,
# and through CMake with and without its components; and run; and the layers of quantised
# checkpoints, with adapters.
. "$(dirname "$0")/lib.sh"
prefix=$(scripts/install_for_bindings.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
# What pkg-config says is quoted for a shell: folders may have spaces.
flags=$(pkg-config --cflags --libs moec)
eval "shared=($flags)"
passed=0
done_with() { echo "ok: $*"; passed=$((passed + 1)); }

"$venv/bin/python" bindings/generate.py --check
done_with "generated layers are current"
"$venv/bin/python" bindings/emit_c.py >"$work/layout.c"
for compiler in gcc clang; do
  $compiler -std=c11 -Werror "$work/layout.c" -o "$work/layout" "${shared[@]}"
  LD_LIBRARY_PATH=$prefix/lib "$work/layout"
  done_with "layouts, constants and symbols by $compiler"
done

warnings="-std=c11 -Wall -Wextra -Wpedantic -Werror"
cc $warnings examples/c/train.c -o "$work/shared" "${shared[@]}"
LD_LIBRARY_PATH=$prefix/lib "$work/shared"
done_with "examples/c, shared"
# Without the shared library beside it, -lmoec is the static one.
cp -r "$prefix" "$work/only_static"
rm "$work"/only_static/lib/libmoec*.so*
flags=$(PKG_CONFIG_PATH=$work/only_static/lib/pkgconfig pkg-config --static --cflags --libs moec)
eval "static=($flags)"
cc $warnings examples/c/train.c -o "$work/static" "${static[@]}"
env -u LD_LIBRARY_PATH "$work/static"
done_with "examples/c, static"

for program in $("$venv/bin/python" scripts/page_code.py c "$work"); do
  cc $warnings "$program" -o "${program%.c}" "${shared[@]}"
  LD_LIBRARY_PATH=$prefix/lib "${program%.c}"
  done_with "docs, $(basename "$program")"
done
nvcc=$(scripts/cuda_toolkit.sh)  # a GPU runs it: scripts/build_gpu_bindings.sh, make test-gpu
cc $warnings -isystem "${nvcc%/bin/nvcc}/include" -I"$prefix/include" -c examples/c/graph.c \
  -o "$work/graph.o"
done_with "examples/c, a CUDA graph: compiled"
cc $warnings -isystem "${nvcc%/bin/nvcc}/include" -isystem tests/capi/nccl -I"$prefix/include" \
  -c examples/c/train_nccl.c -o "$work/train_nccl.o"
done_with "examples/c, ranks of NCCL: compiled"

cc $warnings examples/c/quantised.c -o "$work/quantised" "${shared[@]}" -lm
LD_LIBRARY_PATH=$prefix/lib "$work/quantised"
done_with "examples/c, codes"
"$venv/bin/python" bindings/c/test/golden_table.py >"$work/golden_table.h"
cc $warnings -I"$work" bindings/c/test/golden.c -o "$work/layers" "${shared[@]}" -lm
LD_LIBRARY_PATH=$prefix/lib "$work/layers" tests/golden
done_with "layers of quantised checkpoints, and with adapters"

# The same layer on the ranks of MPI; as root, and with more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
mpicc $warnings examples/c/train_mpi.c -o "$work/ranks" "${shared[@]}"
one=$(LD_LIBRARY_PATH=$prefix/lib "$work/shared")
ranks=$(LD_LIBRARY_PATH=$prefix/lib mpirun -n 3 "$work/ranks")
[ "$ranks" = "$one" ] || die "three ranks say $ranks; one process says $one"
done_with "examples/c, three ranks of MPI"

consumer() { # consumer NAME TARGET COMPONENTS...: configure a project that asks for COMPONENTS
  mkdir -p "$work/$1"
  cat >"$work/$1/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.18)
project(consumer LANGUAGES C)
find_package(moec 0.1 CONFIG REQUIRED ${*:3})
add_executable(program "$root/examples/c/train.c")
target_link_libraries(program PRIVATE $2)
CMAKE
  cmake -S "$work/$1" -B "$work/$1/build" -DCMAKE_PREFIX_PATH="$prefix" >"$work/$1/log" 2>&1
}
consumer plain moec::moec
cmake --build "$work/plain/build" >/dev/null
"$work/plain/build/program"
done_with "CMake package"
components=
if [ -e "$prefix/lib/libmoec_cuda.so.0" ]; then components="COMPONENTS cuda"; fi
consumer components moec::static $components
cmake --build "$work/components/build" >/dev/null
"$work/components/build/program"
done_with "CMake package, static ${components:-(no plug-in is built)}"
if consumer absent moec::moec COMPONENTS nothing_of_the_kind; then
  die "CMake found a component that does not exist"
fi
done_with "CMake package without a component that is asked for"

# Folders that are absolute, not below the prefix; the libraries are build/release's.
apart=$work/apart
mkdir -p "$apart/build/lib"
cp -a "$build"/release/lib/libmoec.* "$apart/build/lib"
cmake -S . -B "$apart/build" -DCMAKE_INSTALL_PREFIX="$apart/prefix" \
  -DCMAKE_INSTALL_LIBDIR="$apart/lib" -DCMAKE_INSTALL_INCLUDEDIR="$apart/headers" >"$work/log"
cmake --install "$apart/build" >>"$work/log"
found=$(PKG_CONFIG_PATH=$apart/lib/pkgconfig pkg-config --cflags --libs moec | xargs)
[ "$found" = "-I$apart/headers -L$apart/lib -lmoec" ] || die "moec.pc says $found"
touch "$apart/lib/libmoec_cuda.so.0"
prefix=$apart consumer absolute moec::moec COMPONENTS cuda
done_with "absolute folders"
echo "$passed passed, 0 failed"
