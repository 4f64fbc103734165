// SPDX-License-Identifier: Apache-2.0

//go:build cgo && !moec_purego

package raw

// Load checks the linked library.
func Load() error { return check("the linked libmoec") }
