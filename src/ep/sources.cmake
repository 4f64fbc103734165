# SPDX-License-Identifier: Apache-2.0
moec_add_sources(communicator.cpp exchange.cpp peer_memory.cpp peers.cpp schemes.cpp)
