// SPDX-License-Identifier: Apache-2.0

package moec_test

import (
	"os"
	"strings"
	"testing"
)

// README.md's program is Example, which is run: the same statements, whatever the line breaks.
func TestReadmeIsTheExample(t *testing.T) {
	squeeze := func(path, from, to string) string {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(text), from)
		body, _, _ := strings.Cut(rest, to)
		body = strings.ReplaceAll(body, "// <nil> 0.05695", "")
		return strings.ReplaceAll(strings.Join(strings.Fields(body), ""), ",)", ")")
	}
	readme := squeeze("README.md", "```go\n", "```")
	example := squeeze("example_test.go", "func Example() {\n", "// Output:")
	if readme == "" || readme != example {
		t.Errorf("README.md and Example differ:\n%s\n%s", readme, example)
	}
}
