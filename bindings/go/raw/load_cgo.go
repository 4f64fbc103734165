// SPDX-License-Identifier: Apache-2.0

//go:build !moec_purego

package raw

// Load does nothing: the library is linked.
func Load() error { return nil }
