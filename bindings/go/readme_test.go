// SPDX-License-Identifier: Apache-2.0

package moec_test

import (
	"os"
	"strings"
	"testing"
)

// README.md's programs are those of example_test.go, which are run: the same statements, whatever
// the line breaks.
func TestReadmeIsTheExamples(t *testing.T) {
	squeeze := func(path, after, from, to string) string {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(text), after)
		_, rest, _ = strings.Cut(rest, from)
		body, _, _ := strings.Cut(rest, to)
		body = strings.NewReplacer("// <nil> 0.05695", "", "// <nil> 0.02", "").Replace(body)
		return strings.ReplaceAll(strings.Join(strings.Fields(body), ""), ",)", ")")
	}
	for _, where := range [][3]string{{"# moec for Go", "func Example() {\n", "// Output:"},
		{"## Quantised experts", "func ExampleQuantise() {\n", "// Output:"},
		{"## A GPU", "([]float32, error) {\n", "\n}"}} {
		readme := squeeze("README.md", where[0], "```go\n", "```")
		example := squeeze("example_test.go", "", where[1], where[2])
		if readme == "" || readme != example {
			t.Errorf("README.md and its example differ:\n%s\n%s", readme, example)
		}
	}
}
