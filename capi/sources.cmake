# SPDX-License-Identifier: Apache-2.0
# The C boundary.
moec_add_sources()
