// SPDX-License-Identifier: Apache-2.0

//go:build moec_purego

package raw

import (
	"strings"
	"testing"
)

// A library that is not libmoec is an error that names it, not a panic.
func TestLoadOfAnotherLibrary(t *testing.T) {
	t.Setenv("MOEC_LIBRARY", "libm.so.6")
	want := "libm.so.6 has no moec_abi_version"
	if err := Load(); err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("%v; %q is right", err, want)
	}
}
