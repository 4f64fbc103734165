# SPDX-License-Identifier: Apache-2.0
moec_add_sources(communicator.cpp exchange.cpp routes.cpp schemes.cpp)
