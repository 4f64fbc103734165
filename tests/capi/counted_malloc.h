// SPDX-License-Identifier: Apache-2.0
// Every host allocation of the process goes through here (the program's malloc wins over libc's),
// so that a test can count them and make the n-th one fail.
#pragma once

#include <cstdint>

namespace moec::test {

struct MallocCounts {
  int64_t allocations, live;  // calls that returned memory; blocks not yet freed
  int64_t largest;            // bytes asked for at once since watch_largest()
};
MallocCounts malloc_counts();
void watch_largest();

// The n-th allocation from now on, by any thread, returns NULL; 0 = none. Returns whether the one
// armed before has failed.
bool fail_allocation(int64_t n);

}  // namespace moec::test
