# SPDX-License-Identifier: Apache-2.0
moec_add_sources(communicator.cpp exchange.cpp exchange_memory.cpp peer_memory.cpp peers.cpp
                 progress.cpp schemes.cpp)
