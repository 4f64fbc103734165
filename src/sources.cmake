# SPDX-License-Identifier: Apache-2.0
# The engine, room by room.
include(${CMAKE_CURRENT_LIST_DIR}/core/sources.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/layer/sources.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/ep/sources.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/experts/sources.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/backend/sources.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/backend/cpu/sources.cmake)
