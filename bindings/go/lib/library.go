// SPDX-License-Identifier: Apache-2.0

//go:build linux && (amd64 || arm64)

// Package lib carries libmoec for programs without cgo: import it for its effect, and nothing has
// to be installed. A program has the library of its own GOARCH. When the library is first used, it
// is written to the user's cache folder, once for each version.
package lib

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"

	"moec.dev/moec/raw"
)

func init() { raw.Provide(Library) }

// Library is the file of libmoec.so.0, which it writes where it is not there; the plug-in lies
// beside it.
func Library() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no cache folder for libmoec.so.0: %w", err)
	}
	entries, err := libraries.ReadDir(folder)
	if err != nil {
		return "", err
	}
	hash, contents := sha256.New(), map[string][]byte{}
	for _, entry := range entries { // in the order of their names
		name := entry.Name()
		if contents[name], err = libraries.ReadFile(filepath.Join(folder, name)); err != nil {
			return "", err
		}
		hash.Write(contents[name])
	}
	place := filepath.Join(cache, "moec", hex.EncodeToString(hash.Sum(nil))[:16])
	if err := os.MkdirAll(place, 0o700); err != nil {
		return "", fmt.Errorf("cannot write libmoec.so.0: %w", err)
	}
	for name, content := range contents {
		if err := write(filepath.Join(place, name), content); err != nil {
			return "", fmt.Errorf("cannot write %s: %w", name, err)
		}
	}
	return filepath.Join(place, "libmoec.so.0"), nil
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
