// SPDX-License-Identifier: Apache-2.0
// In front of every file here: XLA's headers make string streams, and libstdc++'s own copies of
// those have symbols of g++ 11. With copies of ours the handlers run on older systems, too.
#pragma once

#include <istream>
#include <string>

#if defined(_GLIBCXX_EXTERN_TEMPLATE)
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#include <sstream>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 1
#endif
