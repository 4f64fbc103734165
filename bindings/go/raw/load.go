// SPDX-License-Identifier: Apache-2.0

//go:build moec_purego || !cgo

package raw

import (
	"fmt"
	"os"

	"github.com/ebitengine/purego"
)

// Load opens libmoec (MOEC_LIBRARY, else the one that a package provides, else libmoec.so.0 by the
// loader's search) and finds every function.
func Load() (err error) {
	name, remedy := os.Getenv("MOEC_LIBRARY"), "set MOEC_LIBRARY"
	if name == "" && provided != nil {
		if name, err = provided(); err != nil {
			return fmt.Errorf("moec: %w; set XDG_CACHE_HOME to a folder that takes files, or "+
				"MOEC_LIBRARY", err)
		}
		remedy = "where that folder forbids programs (noexec), set XDG_CACHE_HOME to one that allows " +
			"them, or MOEC_LIBRARY"
	}
	if name == "" {
		name = "libmoec.so.0"
	}
	library, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return fmt.Errorf("moec: cannot open %s: %w; %s", name, err, remedy)
	}
	find := func(symbol string) error {
		address, err := purego.Dlsym(library, symbol)
		if err != nil {
			return fmt.Errorf("moec: %s has no %s; another version is needed", name, symbol)
		}
		purego.RegisterFunc(symbols[symbol], address)
		return nil
	}
	for _, symbol := range []string{"moec_abi_version", "moec_version"} {
		if err := find(symbol); err != nil {
			return err
		}
	}
	if err := check(name); err != nil {
		return err
	}
	for symbol := range symbols {
		if err := find(symbol); err != nil {
			return err
		}
	}
	return nil
}
