module moec.dev/moec

go 1.21

require github.com/ebitengine/purego v0.8.4
