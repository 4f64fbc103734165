# SPDX-License-Identifier: Apache-2.0
# Every target is a script: this file only names them.
.PHONY: help demo wheel packages test docs test-gpu bench bench-gpu bench-peers format lint \
        abi-bless clean
.DEFAULT_GOAL := help
# What scripts fetch into build/, and only fetch.
downloads := venv docs-venv cuda cuda-aarch64 zig julia go-toolchain xla_headers py-packages \
             peers-venv frameworks frameworks-older frameworks-trl aarch64-python

help:         ## this list
	@sed -n 's/^\([a-z-]*\): *## /  make \1\t/p' Makefile | expand -t 22

demo:         ## build what the demo needs and show the main job
	@scripts/demo.sh
wheel:        ## the Python wheels to ship, CPU and GPU, into build/wheel (ARCH=aarch64: across)
	@scripts/wheel.sh $(ARCH)
packages:     ## .deb, .rpm and .tar.gz of the library, into build/packages (ARCH=aarch64: across)
	@scripts/packages.sh $(ARCH)
test:         ## build everything and run every test that needs no GPU
	@scripts/test.sh
docs:         ## the documentation, into build/docs/html
	@scripts/docs.sh
test-gpu:     ## the tests of the CUDA backend, on a machine with a GPU
	@scripts/test_gpu.sh
bench:        ## CPU speeds of real layer shapes beside this machine's own limits
	@scripts/bench.sh
bench-gpu:    ## GPU speeds, likewise
	@scripts/bench_gpu.sh
bench-peers:  ## the same shapes on other libraries, in their own environment
	@scripts/bench_peers.sh
format:       ## rewrite sources in the house's format
	@scripts/format.sh
lint:         ## rooms, format and clang-tidy
	@scripts/lint.sh
abi-bless:    ## accept today's header as the ABI snapshot (a break: say what breaks in the commit)
	@scripts/abi_bless.sh
clean:        ## remove all that was built; keeps the downloaded tools and packages
	@[ ! -d build ] || find build -mindepth 1 -maxdepth 1 $(patsubst %,! -name '%',$(downloads)) \
	  -exec rm -rf {} +
