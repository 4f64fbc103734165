// SPDX-License-Identifier: Apache-2.0
// What most files of the library include of the standard library. CMake compiles it once for all of
// them, which halves their time; each file still includes what it uses.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>
