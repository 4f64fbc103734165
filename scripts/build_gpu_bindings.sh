#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build_gpu_bindings.sh FOLDER: the device-memory tests of Rust and Go, README's C program of a GPU,
# examples/c/graph.c and train_nccl.c, as FOLDER/bindings_rust, bindings_go, bindings_c, graph_c and
# nccl_c, for machines with a GPU but without their tools. Rust and Go open libmoec (MOEC_LIBRARY)
# and the CUDA driver at run time; the C programs are linked to build/release's library and find it
# by LD_LIBRARY_PATH. nccl_c takes NCCL from PyTorch's packages in build/frameworks.
here=$PWD
. "$(dirname "$0")/lib.sh"
[ -n "${1:-}" ] || die "usage: build_gpu_bindings.sh FOLDER"
cd "$here"
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$root/bindings/rust"
"$root/scripts/cargo.sh" test --no-run --features dynamic -p moec --test device \
  --message-format json >"$build/gpu_bindings.json"
program=$(sed -nE 's/.*"executable":"([^"]*\/device-[^"]*)".*/\1/p' "$build/gpu_bindings.json")
cp "$program" "$folder/bindings_rust"
strip "$folder/bindings_rust"
cd "$root"
python3 tests/house/readme_c.py >"$build/readme_gpu.c"
cc -std=c11 -Wall -Wextra -Werror -Icapi/include "$build/readme_gpu.c" -o "$folder/bindings_c" \
  "$build/release/lib/libmoec.so.0"
nvcc=$(scripts/cuda_toolkit.sh)
toolkit=${nvcc%/bin/nvcc}
runtime=$(find -L "$toolkit" -name libcudart_static.a | head -n 1)
cuda_program() {  # cuda_program SOURCE NAME OPTIONS...
  cc -std=c11 -Wall -Wextra -Werror -Icapi/include -isystem "$toolkit/include" "$1" \
    -o "$folder/$2" "${@:3}" "$build/release/lib/libmoec.so.0" "$runtime" -ldl -lrt -lpthread \
    -lstdc++
}
cuda_program examples/c/graph.c graph_c
nccl=$(find "$build" -path '*/frameworks/*/nvidia/nccl/lib/libnccl.so.2' | head -n 1)
if [ "$nccl" ]; then
  cuda_program examples/c/train_nccl.c nccl_c -isystem "${nccl%/lib/*}/include" "$nccl"
else
  echo "nccl_c: not built, build/frameworks has no NCCL (scripts/frameworks_venv.sh)" >&2
fi
cd bindings/go
CGO_ENABLED=0 "$root/scripts/go.sh" test -c -tags moec_purego -ldflags "-s -w" \
  -o "$folder/bindings_go" .
