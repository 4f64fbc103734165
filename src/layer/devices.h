// SPDX-License-Identifier: Apache-2.0
// The devices of this process, for callers that have no context yet.
#pragma once

#include "backend/registry.h"
