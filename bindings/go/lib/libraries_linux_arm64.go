// SPDX-License-Identifier: Apache-2.0

package lib

import "embed"

const folder = "linux_arm64"

// The libraries: libmoec.so.0 and, where it was built, its CUDA plug-in libmoec_cuda.so.0.
//
//go:embed linux_arm64/*.so.0
var libraries embed.FS
