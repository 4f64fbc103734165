// SPDX-License-Identifier: Apache-2.0
// Which instruction set the CPU backend uses: the best one here, or the one MOEC_CPU_ISA names.
#pragma once

#include <string>

#include "backend/cpu/tile.h"

namespace moec::cpu {

// The set in use. The first call chooses it; throws E_UNSUPPORTED when MOEC_CPU_ISA names a set
// that is unknown or that this machine lacks.
const TileKernels& tile_kernels();

// Use the set of this name from now on; null: choose as at the start. Not while a product runs.
void select_isa(const char* name);

// Choose now, for a new context: refuses as tile_kernels() does, and with E_INVALID_STATE when
// MOEC_CPU_ISA has changed since the choice.
void check_isa();

// "portable avx2 ...": the sets this machine and operating system can run.
std::string available_isas();

}  // namespace moec::cpu
