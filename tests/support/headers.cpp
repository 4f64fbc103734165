// SPDX-License-Identifier: Apache-2.0
// The file of the targets that own the compiled headers.
#include "support/headers.h"
