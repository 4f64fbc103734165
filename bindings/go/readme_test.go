// SPDX-License-Identifier: Apache-2.0

package moec_test

import (
	"os"
	"strings"
	"testing"
)

// The programs of README.md and of docs/howto/go.md are those of example_test.go, which are run:
// the same statements, whatever the line breaks.
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
	const page = "../../docs/howto/go.md"
	for _, where := range [][6]string{
		{"README.md", "```go\n", "func main() {\n", "\n}\n```", "func Example() {\n", "// Output:"},
		{page, "## Quantised experts", "```go\n", "```", "func ExampleQuantise() {\n", "// Output:"},
		{page, "## A GPU", "```go\n", "```", "([]float32, error) {\n", "\n}"}} {
		program := squeeze(where[0], where[1], where[2], where[3])
		example := squeeze("example_test.go", "", where[4], where[5])
		if program == "" || program != example {
			t.Errorf("%s and its example differ:\n%s\n%s", where[0], program, example)
		}
	}
}
