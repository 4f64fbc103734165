module moec.dev/moec/lib/linux_amd64

go 1.21

require moec.dev/moec v0.1.0
