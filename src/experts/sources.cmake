# SPDX-License-Identifier: Apache-2.0
moec_add_sources(adapters.cpp backward.cpp describe.cpp experts.cpp forward.cpp memory.cpp)
