// SPDX-License-Identifier: Apache-2.0

// Package linux_amd64 carries libmoec for programs without cgo: import it for its effect, and
// nothing has to be installed. When the library is first used, it is written to the user's cache
// folder, once for each version.
package linux_amd64

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"

	"moec.dev/moec/raw"
)

// The libraries: libmoec.so.0 and, where it was built, its CUDA plug-in libmoec_cuda.so.0.
//
//go:embed *.so.0
var libraries embed.FS

func init() { raw.Provide(Library) }

// Library is the file of libmoec.so.0, which it writes where it is not there; the plug-in lies
// beside it.
func Library() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no cache folder for libmoec.so.0: %w", err)
	}
	entries, err := libraries.ReadDir(".")
	if err != nil {
		return "", err
	}
	hash, contents := sha256.New(), map[string][]byte{}
	for _, entry := range entries { // in the order of their names
		if contents[entry.Name()], err = libraries.ReadFile(entry.Name()); err != nil {
			return "", err
		}
		hash.Write(contents[entry.Name()])
	}
	folder := filepath.Join(cache, "moec", hex.EncodeToString(hash.Sum(nil))[:16])
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return "", fmt.Errorf("cannot write libmoec.so.0: %w", err)
	}
	for name, content := range contents {
		if err := write(filepath.Join(folder, name), content); err != nil {
			return "", fmt.Errorf("cannot write %s: %w", name, err)
		}
	}
	return filepath.Join(folder, "libmoec.so.0"), nil
}

// write makes a file of that content, whole or not at all, whoever else does the same.
func write(path string, content []byte) error {
	if there, err := os.ReadFile(path); err == nil && bytes.Equal(there, content) {
		return nil
	}
	file, err := os.CreateTemp(filepath.Dir(path), "new")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name()) // of one that failed
	_, err = file.Write(content)
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return err
	}
	if err := os.Chmod(file.Name(), 0o755); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}
