// SPDX-License-Identifier: Apache-2.0

package moec

import (
	"bytes"
	"fmt"
	"runtime"
	"sync"
	"unsafe"

	"moec.dev/moec/raw"
)

// Error is a failed call in the library's own words.
type Error struct {
	Code       int32  // one of raw.E...
	NativeCode int32  // the driver's, the system's or a callback's number
	Site       string // C entry point
	Message    string
}

func (e *Error) Error() string { return fmt.Sprintf("%s (%s)", e.Message, e.Name()) }

// Name is the code's name, such as MOEC_E_SHAPE.
func (e *Error) Name() string {
	if load() != nil {
		return "MOEC_E_ABI" // the only error without a library
	}
	return text(raw.StatusName(e.Code))
}

var load = sync.OnceValue(raw.Load)

// loaded is nil once the library is found, of this ABI and not too old.
func loaded() error {
	if err := load(); err != nil {
		return &Error{Code: raw.EAbi, Site: "moec_abi_version", Message: err.Error()}
	}
	return nil
}

// call runs one raw call and reads its error on the same OS thread: both are thread-local in C.
func call(function func() int32) error {
	if err := loaded(); err != nil {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	status := function()
	if status >= 0 {
		return nil
	}
	info := new(raw.ErrorInfo)
	info.StructSize = uint32(unsafe.Sizeof(*info))
	raw.LastError(unsafe.Pointer(info))
	return &Error{status, info.NativeCode, until0(info.Site[:]), until0(info.Message[:])}
}

func until0(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// text copies a NUL-terminated static text of the library.
func text(address uintptr) string {
	if address == 0 {
		return ""
	}
	// A C address held as a number: read it through a pointer to the variable, which vet can follow.
	start := *(**byte)(unsafe.Pointer(&address))
	length := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(start), length)) != 0 {
		length++
	}
	return string(unsafe.Slice(start, length))
}
