#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_cuda_aarch64.sh: the CUDA plug-in can be built for aarch64: one file of Hopper's kernels and
# one of the portable ones, compiled across as `MOEC_CUDA=ON scripts/packaged.sh aarch64` compiles
# all of them, and linked with that processor's cudart into a program, which runs in qemu-aarch64
# and hears that there is no driver. Shown to fail: the objects of this machine's processor. And
# Debian 12's CMake (3.25.1), where it is installed, which knows no C++20 of nvcc, is told of it.
. "$(dirname "$0")/lib.sh"
tree=$build/aarch64-cuda nvcc=$(scripts/cuda_toolkit.sh aarch64)
cmake --preset aarch64 -B "$tree" --log-level=WARNING -DMOEC_DEVELOPER=OFF -DMOEC_CUDA=ON \
  -DCMAKE_CUDA_COMPILER="$nvcc"
objects=()
for pair in sm90:sm90/work_counters portable:device/pointer_table; do
  objects+=("CMakeFiles/moec_cuda_${pair%:*}.dir/src/backend/cuda/${pair#*:}.cu.o")
done
cmake --build "$tree" -j "$(job_count)" --target "${objects[@]}"
cd "$tree"
for object in "${objects[@]}"; do
  readelf -h "$object" | grep -q "Machine: *AArch64" || die "$object is not of aarch64"
done
cat >driver.cpp <<'CPP'
extern "C" int cudaDriverGetVersion(int*);
extern "C" int cudaGetDeviceCount(int*);
extern "C" const char* cudaGetErrorName(int);
extern "C" int puts(const char*);
int main() {
  int count = 0, version = -1;
  cudaDriverGetVersion(&version);
  puts(version == 0 ? cudaGetErrorName(cudaGetDeviceCount(&count)) : "a driver in qemu");
}
CPP
aarch64-linux-gnu-g++ driver.cpp "${objects[@]}" -o driver -ldl -lpthread -lrt \
  "$(dirname "$(dirname "$nvcc")")/targets/sbsa-linux/lib/libcudart_static.a"
said=$(qemu-aarch64 -L /usr/aarch64-linux-gnu ./driver) right=cudaErrorInsufficientDriver
[ "$said" = $right ] || die "cudart says $said without a driver; $right is right"
debian=0
if [ -x /usr/bin/cmake ]; then
  rm -rf "$tree-debian"
  /usr/bin/cmake -S "$root" -B "$tree-debian" --log-level=WARNING -G "Unix Makefiles" \
    -DMOEC_CUDA=ON -DCMAKE_CUDA_COMPILER="$("$root/scripts/cuda_toolkit.sh")"
  flags=$tree-debian/CMakeFiles/moec_cuda_sm90.dir/flags.make
  grep -q '^CUDA_FLAGS.* -std=c++20' "$flags" || die "/usr/bin/cmake compiles CUDA without C++20"
  debian=1
fi
echo "$((${#objects[@]} + 1 + debian)) passed, 0 failed: CUDA objects of aarch64, and $said"
