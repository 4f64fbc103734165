// SPDX-License-Identifier: Apache-2.0
// What most test programs include. CMake compiles it once for all of them; each file still includes
// what it uses.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>
