module moec.dev/moec/lib

go 1.21

require moec.dev/moec v0.1.0
