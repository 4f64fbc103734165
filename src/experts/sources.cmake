# SPDX-License-Identifier: Apache-2.0
moec_add_sources(backward.cpp describe.cpp experts.cpp forward.cpp memory.cpp)
