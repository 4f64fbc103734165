// SPDX-License-Identifier: Apache-2.0

// Package raw is moec.h one to one: mirror structs with a uintptr for every pointer, and every
// function, through cgo or (build tag moec_purego) through dlopen. Package moec is the safe form.
package raw

import "fmt"

// provided gives the file of a library that a package carries.
var provided func() (string, error)

// Provide has Load ask `library` for a file when MOEC_LIBRARY is not set. Packages that carry libmoec
// call it when they are initialised. A program that is linked to libmoec by cgo does not ask.
func Provide(library func() (string, error)) { provided = library }

// check refuses a library of another ABI, or one that is older than these bindings.
func check(name string) error {
	const built = HeaderVersionMajor<<22 | HeaderVersionMinor<<12 | HeaderVersionPatch
	abi, version := AbiVersion(), Version()
	if abi == HeaderAbiVersion && version >= built {
		return nil
	}
	return fmt.Errorf("moec: %s is %d.%d.%d with ABI %d; %d.%d.%d or later with ABI %d is needed",
		name, version>>22, version>>12&0x3ff, version&0xfff, abi,
		HeaderVersionMajor, HeaderVersionMinor, HeaderVersionPatch, HeaderAbiVersion)
}
